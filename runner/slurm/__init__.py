"""SLURM: writes and submits scripts, and reads the state of jobs."""
