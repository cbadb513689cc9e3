"""Execution of one run directory: data, workers, nodes, preemption, the first failure, the report."""
