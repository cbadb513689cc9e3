"""Compare the speeds and losses of runs. Runs with the same settings share one row of the comparison.

The comparison is a table, JSON, CSV or an HTML page. It is computed from the runs' files, without importing torch or user code.
"""
