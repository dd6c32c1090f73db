"""Pools: where GPUs are that a batch system gives out, and how images are verified there.

One pool, one folder, one row here.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING

from imagefactory.errors import UsageError

if TYPE_CHECKING:  # the command line reads the names alone, and starts fast
    from imagefactory.pools.model import Pool

HTCONDOR = "htcondor"
"""The pool of a sweep that names none: there was no other."""
POOLS = {HTCONDOR: "imagefactory.pools.htcondor.pool"}
"""By the word of `verify --on`, the module whose `make_pool(environ)` gives the pool of this machine."""


def open_pool(name: str, environ: Mapping[str, str]) -> Pool:
    """The pool of a row; nothing is asked of it yet. Raises UsageError for a name that has none."""
    if name not in POOLS:
        raise UsageError(
            f"the pool '{name[:40]}' is not known", hint=f"this imagefactory knows {', '.join(POOLS)}"
        )
    pool: Pool = import_module(POOLS[name]).make_pool(environ)
    return pool
