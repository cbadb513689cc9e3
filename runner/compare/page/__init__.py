"""A comparison as one HTML file: the table, the charts and every run."""
