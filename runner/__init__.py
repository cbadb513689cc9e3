"""The experiment engine: compose, check, launch, measure, record, compare. No model code.

    cli > verbs > sweep > launch, predict > calibrate > slurm, measure > config > profiler, trackers > compare > rundir
        > ledger > figures > commands > process, console

Each room imports only rooms to its right, and all may import `recipes`. `pyproject.toml` has the complete order.
"""
