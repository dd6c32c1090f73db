"""What is wrong with a batch script for Slurm. Nothing in it is executed."""
