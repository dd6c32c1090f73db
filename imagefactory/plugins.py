"""Load parts of extras by name. The core imports no extra, so an extra can be deleted."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Any

EXTRAS = "imagefactory.extras"


def has_extra(name: str) -> bool:
    """Return whether the directory of an extra exists."""
    spec = find_spec(f"{EXTRAS}.{name}")
    return spec is not None and spec.has_location  # a directory without files is not an extra


def load_extra(row: str) -> Any:
    """Return a part of an extra by its name (`sbom.attest:attest`), None if the extra was deleted."""
    module, name = row.split(":")
    if not has_extra(module.partition(".")[0]):
        return None
    return getattr(import_module(f"{EXTRAS}.{module}"), name)
