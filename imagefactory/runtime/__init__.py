"""Runners, which start images: a file and a row in settings/choices.py for each."""
