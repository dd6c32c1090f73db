"""Wheels built from source, for packages that have none."""
