"""Combinations of a sweep -> run directories, executed until each has a result."""
