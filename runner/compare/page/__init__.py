"""Write a comparison as one HTML file: the table, charts and every run."""
