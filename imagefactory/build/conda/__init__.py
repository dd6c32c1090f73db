"""Conda packages for the assemble engine: linked into a staging prefix, and from there into layers."""
