"""The building of images. Each engine is one file, and one row in settings/choices.py."""

from __future__ import annotations
