"""Build wheels from source, for packages that have none."""
