"""Compare run directories: the settings that vary, a row per combination, differences and loss verdicts.

The result is a table, JSON, CSV or a page. It follows from files alone: torch is not imported, and no code of a run is executed.
"""
