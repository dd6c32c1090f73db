"""Wheels from a package index: the index of this machine, uv as the solver, the file of a lock."""
