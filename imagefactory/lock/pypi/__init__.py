"""Wheels from a package index: which index this machine uses, uv as the solver, the file of a lock."""
