"""The experiment engine: it composes, checks, launches, measures, records and compares runs. Model code is in `recipes`.

    cli > verbs > sweep > launch, predict > calibrate > slurm, measure > config > profiler, trackers > compare > rundir
        > ledger > figures > commands > process, console

Each package imports only packages further right, never further left. All may import `recipes`. The import contracts in
`pyproject.toml` contain the complete order.
"""
