"""Check submit files and batch scripts against a pool."""

from __future__ import annotations
