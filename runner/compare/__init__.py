"""Compare run directories: find the settings that vary, make a row per combination, and compare speeds and losses.

The result is a table, JSON, CSV or a page. It is computed from files, without importing torch or executing user code.
"""
