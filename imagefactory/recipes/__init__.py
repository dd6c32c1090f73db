"""Recipes: read, checked, expanded to targets, and drafted from existing files."""
