"""One run directory executed: data, workers, nodes, preemption, the first failure, the report."""
