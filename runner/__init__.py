"""The experiment engine: compose, check, launch, measure, record, compare. No model code.

    cli > verbs > sweep > launch > slurm, measure > config > profiler, trackers > compare > rundir > figures > process, console

Imports point down, and from each to `recipes`.
"""
