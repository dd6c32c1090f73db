"""Check whether a model computes the same results in other runtimes."""
