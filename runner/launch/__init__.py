"""Executes one run directory on this node: data, workers, failures, progress."""
