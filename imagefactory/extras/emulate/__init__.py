"""Emulate a GPU, to measure how a program would use it."""
