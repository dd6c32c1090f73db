"""Slurm as a pool, through its commands."""
