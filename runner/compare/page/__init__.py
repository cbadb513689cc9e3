"""Write a comparison of runs as one HTML file with a table, charts and a section for each run."""
