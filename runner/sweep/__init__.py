"""Sweeps: writes the run directories of all combinations, and executes the runs."""
