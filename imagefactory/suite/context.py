"""The input and the results of checks."""

from __future__ import annotations

import importlib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from . import table


class CheckFailure(Exception):
    """A failed check, with a line for people and its outcome in the tables."""

    def __init__(self, detail: str, *, outcome: str = table.LOAD_FAILED) -> None:
        super().__init__(detail)
        self.detail, self.outcome = detail, outcome


class LazyModule:
    """A module of the image that is imported at its first use, after `prepare` has set the environment.

    Code that a framework compiles must not use it, because compilers would see this class instead of the
    module.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module(self._name), name)


@dataclass(frozen=True)
class Finding:
    """A passed check, with a line for people and the measured numbers."""

    detail: str
    numbers: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Expected:
    """The requirements for the image, from its lock and recipe.

    `framework` is a file in frameworks/, `distribution` its name in the lock. `packages` maps names of locked
    wheels (PEP 503) to versions, `conda` names of conda packages to `version build`. `cuda` is `12.1`, `12`,
    `rocm7` or `none`. The suite must run as user `uid`, or as any user if None. `named` are packages in the
    recipe.
    """

    nonce: str
    target: str
    framework: str
    distribution: str
    version: str
    cuda: str
    python: str
    packages: Mapping[str, str]
    checks: tuple[str, ...]
    uid: int | None
    conda: Mapping[str, str] = field(default_factory=dict)
    named: tuple[str, ...] = ()

    @property
    def rocm(self) -> str:
        """The ROCm version (`7`), empty for an image without ROCm."""
        return self.cuda[len(table.ROCM) :] if self.cuda.startswith(table.ROCM) else ""

    @property
    def locked(self) -> dict[str, str]:
        """The version of every locked package, from conda or a wheel."""
        return {**{name: text.partition(" ")[0] for name, text in self.conda.items()}, **self.packages}


@dataclass(frozen=True)
class Context:
    """The image under test. `site` is its directory of packages, `prefix` the environment."""

    expected: Expected
    framework: Any
    site: str
    prefix: str


def write_json(path: str, document: Mapping[str, Any], *, allow_nan: bool = False) -> None:
    """Write a file next to `path` and rename it, so that readers see only complete documents."""
    with open(f"{path}.part", "w", encoding="utf-8") as file:
        json.dump(document, file, indent=1, allow_nan=allow_nan)
    os.replace(f"{path}.part", path)


def load_document(text: str, version: int) -> dict[str, Any]:
    """Return the document of the host. Raises ValueError or KeyError if it has another format."""
    data: dict[str, Any] = json.loads(text)
    if data["format"] != version:
        raise ValueError(
            f"the expectations have format {data['format']}, but this suite reads format {version}"
        )
    return data


def expected_image(data: Mapping[str, Any], checks: tuple[str, ...]) -> Expected:
    return Expected(
        nonce=data["nonce"],
        target=data["target"],
        framework=table.FRAMEWORKS.get(data["framework"], table.OTHER),
        distribution=data["framework"],
        version=data["version"],
        cuda=data["cuda"],
        python=data["python"],
        packages=dict(data["packages"]),
        conda=dict(data["conda"]),
        checks=checks,
        uid=data.get("uid"),
        named=tuple(data.get("named", ())),
    )


def parse_expected(text: str) -> Expected:
    """Return the expectations of the smoke test. Raises ValueError or KeyError."""
    data = load_document(text, table.FORMAT)
    unknown = sorted(set(data["checks"]) - set(table.CHECKS))
    if unknown:
        raise ValueError(f"unknown checks: {', '.join(unknown)}")
    return expected_image(data, tuple(name for name in table.CHECKS if name in data["checks"]))


def same_release(version: str, other: str) -> bool:
    """Return whether two versions have the same numbers: 2.4.0.post302 and 2.4.0, 0.20.0a0+1f2 and 0.20.0.

    conda packages are often built from sources with a longer version.
    """
    return _version_key(version)[0] == _version_key(other)[0]


def same_version(version: str, other: str) -> bool:
    """Return whether two spellings are the same version (PEP 440): 2024.01 and 2024.1, 1.0 and 1.0.0."""
    return _version_key(version) == _version_key(other)


_SPELLINGS = {"alpha": "a", "beta": "b", "c": "rc", "pre": "rc", "preview": "rc", "r": "post", "rev": "post"}


def _version_key(version: str) -> tuple[list[int], list[int | str], str]:
    public, _, local = version.lower().strip().removeprefix("v").partition("+")
    release = re.match(r"[0-9!]+(?:\.[0-9]+)*", public)
    numbers = [int(part) for part in re.findall(r"\d+", release[0])] if release else []
    while numbers and numbers[-1] == 0:
        numbers.pop()
    rest: list[int | str] = [
        int(part) if part.isdigit() else _SPELLINGS.get(part, part)
        for part in re.findall(r"\d+|[a-z]+", public[release.end() if release else 0 :])
    ]
    return numbers, rest, local
