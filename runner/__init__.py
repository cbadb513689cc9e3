"""The experiment engine: compose, check, launch, measure, record, compare. No model code.

    cli > verbs > sweep > launch, predict > calibrate > slurm, measure > config > profiler, trackers > compare > rundir
        > ledger > figures > commands > process, console

Each package imports only packages to its right, and all may import `recipes`. The import contracts in `pyproject.toml` contain
the complete order.
"""
