"""Sweeps as values and files: which cells are queued, what is in hand, what lies in the folder of one."""
