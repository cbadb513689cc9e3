"""Sweeps: writing a run directory for each combination, and executing the runs."""
