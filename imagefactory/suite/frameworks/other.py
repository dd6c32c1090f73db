"""Any package that no other file knows: what it is imported as is read from what it brings."""

from __future__ import annotations

MODULES: tuple[tuple[str, str], ...] = ()


def prepare() -> None:
    """Nothing is known that it would need."""
