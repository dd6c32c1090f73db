"""Conda packages: access to their channels, py-rattler as the solver, the file of a lock."""
