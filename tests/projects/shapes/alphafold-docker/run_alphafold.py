"""The program that the entry point starts."""
