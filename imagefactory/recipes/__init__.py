"""Recipes: read, judged, expanded to targets, and drafted from what people have."""
