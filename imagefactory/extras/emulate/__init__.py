"""A GPU that is not there: how a program would use it."""
