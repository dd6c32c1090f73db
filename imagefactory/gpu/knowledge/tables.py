"""Read the data files in this directory, each once, at first use."""

from __future__ import annotations

import tomllib
from functools import cache
from pathlib import Path
from typing import Any


@cache
def read_table(name: str) -> dict[str, Any]:
    """Return the parsed file `<name>.toml` in this directory. Callers must not change the result."""
    return tomllib.loads(Path(__file__).with_name(f"{name}.toml").read_text(encoding="utf-8"))


def covers(prefix: str, version: str) -> bool:
    """Return whether `prefix` covers `version` by whole components: `2.3` covers 2.3 and 2.3.1, not 2.30."""
    return version == prefix or version.startswith(prefix + ".")


def numbers(version: str) -> tuple[int, ...]:
    """Return a version of digits and dots as a sort key. Raises ValueError for other versions."""
    return tuple(int(part) for part in version.split("."))
