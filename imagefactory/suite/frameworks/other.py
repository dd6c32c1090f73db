"""Any package that no other file knows. Its modules are read from its files."""

from __future__ import annotations

MODULES: tuple[tuple[str, str], ...] = ()
