"""Conda's packages: how this machine reaches their channels, py-rattler as the solver, the file of a lock."""
