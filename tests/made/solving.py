"""A small conda target to solve."""

from __future__ import annotations

from typing import Any

from imagefactory.lock.pypi.uv import UvLocker
from imagefactory.model import Lock, SourceLocation, Target
from imagefactory.recipes.values import CHANNEL_ROOT
from tests.made.values import make_base, make_target

BASE = make_base()
SYSTEM = (("__archspec", "x86_64"), ("__cuda", "12.1"), ("__glibc", "2.36"))


def target(*requirements: str, **more: Any) -> Target:
    given: dict[str, Any] = {
        "name": "tiny-1-cu121",
        "family": "tiny",
        "source": "conda",
        "framework": "tiny",
        "version": "1",
        "requirements": requirements or ("tiny 1.*",),
        "channels": (f"{CHANNEL_ROOT}/conda-forge",),
        "virtual": SYSTEM,
        "where": SourceLocation(file="recipes/tiny.yaml", line=7, column=3),
    }
    return make_target(**{**given, **more})


def no_pip() -> UvLocker:
    raise AssertionError("nothing here comes from PyPI")


def pins(lock: Lock) -> dict[str, str]:
    return {package.name: package.version for package in lock.conda}
