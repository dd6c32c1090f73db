"""Bases of images: built from Debian packages, or pulled from registries."""
