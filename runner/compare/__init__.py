"""Compare the speeds and losses of runs. Runs with the same settings share one row of the comparison.

The comparison is a table, JSON, CSV or an HTML page, and is computed from files, without torch or user code.
"""
