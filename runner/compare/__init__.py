"""Compare the speeds and losses of runs in a table, JSON, CSV or an HTML page. Runs with the same settings share one row.
All results are computed from the runs' files, without importing torch or user code."""
