"""Packages without a file here. Their modules are found from their files."""

from __future__ import annotations

MODULES: tuple[tuple[str, str], ...] = ()
