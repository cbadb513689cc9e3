"""The `checkpoint` group: saving a run, and resuming it under any parallelism and number of ranks."""
