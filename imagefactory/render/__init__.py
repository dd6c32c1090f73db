"""A target with its lock becomes files that a person can read and build by hand."""
