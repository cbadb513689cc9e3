"""The experiment engine: it composes, checks, launches, measures, records and compares runs. Model code is in `recipes`.

    cli > verbs > sweep > launch, calibrate > predict > slurm, measure > config > profiler, trackers > compare > rundir
        > ledger > figures > commands > process, console

A package may import only the packages to its right in the list above. All packages may import `recipes`. The import contracts
in `pyproject.toml` contain the complete order of packages.
"""
