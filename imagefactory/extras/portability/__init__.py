"""Checks whether a model gives the same results in other runtimes."""
