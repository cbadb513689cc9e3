"""Writes and submits SLURM scripts, and reads the state of jobs."""
