"""The steps of each command, in order. All functions that need a Project are here."""

from __future__ import annotations
