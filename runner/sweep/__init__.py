"""Writes the run directories for all combinations of a sweep, and executes the runs."""
