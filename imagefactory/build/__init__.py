"""Engines that build images. Each is one file, and one row in settings/choices.py."""

from __future__ import annotations
