"""SLURM: writing and submitting its scripts, and asking it how its jobs are."""
