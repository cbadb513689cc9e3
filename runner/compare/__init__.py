"""Compare run directories: the settings that vary, a row per combination, differences and loss verdicts.

The result is a table, JSON, CSV or a page. It is computed from files, without importing torch or executing code of a run.
"""
