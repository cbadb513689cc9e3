"""Submits runs to SLURM: writes sbatch scripts, calls SLURM's commands and reads the states of jobs."""
