"""What makes images. One engine, one file, one row in settings/choices.py."""

from __future__ import annotations
