"""Recipes: reading, checking, expanding to targets, and drafting from existing files."""
