"""What every check is given, and how it answers."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from . import table


class CheckFailure(Exception):
    """A check does not hold. `outcome` is the word of the tables for it."""

    def __init__(self, detail: str, *, outcome: str = table.LOAD_FAILED) -> None:
        super().__init__(detail)
        self.detail, self.outcome = detail, outcome


@dataclass(frozen=True)
class Finding:
    """A check holds. `detail` is one line for a person, `numbers` what was measured."""

    detail: str
    numbers: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Expected:
    """What the image must be, as its lock and recipe say.

    `framework` is a file of frameworks/, `distribution` its name in the lock, `packages` maps the names
    of locked wheels (PEP 503) to versions, `conda` those of conda's packages to `version build`, empty for
    an environment without them. `cuda` is `12.1`, `12`, `rocm7` or `none`. `uid` is the user the
    suite must find itself to be, None when that is not looked at. `named` are the packages that the recipe
    names, of wheels and of conda's.
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
        """`7` of an image for AMD's GPUs, empty for any other."""
        return self.cuda[len(table.ROCM) :] if self.cuda.startswith(table.ROCM) else ""

    @property
    def locked(self) -> dict[str, str]:
        """Every locked name, of conda or of a wheel -> its version."""
        return {**{name: text.partition(" ")[0] for name, text in self.conda.items()}, **self.packages}


@dataclass(frozen=True)
class Context:
    """`site` is the folder of the image's packages, `prefix` the environment it belongs to."""

    expected: Expected
    framework: Any
    site: str
    prefix: str


def parse_expected(text: str) -> Expected:
    """Raises ValueError or KeyError for a text that the host did not write."""
    data = json.loads(text)
    if data["format"] != table.FORMAT:
        raise ValueError(f"expectations of format {data['format']}, this suite reads {table.FORMAT}")
    unknown = sorted(set(data["checks"]) - set(table.CHECKS))
    if unknown:
        raise ValueError(f"no such check: {', '.join(unknown)}")
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
        checks=tuple(name for name in table.CHECKS if name in data["checks"]),
        uid=data.get("uid"),
        named=tuple(data["named"]),
    )


def same_release(one: str, other: str) -> bool:
    """Whether two versions have the same numbers: 2.4.0.post302 and 2.4.0, 0.20.0a0+1f2 and 0.20.0.

    conda's packages are often built from sources that call themselves something more.
    """
    return _version_key(one)[0] == _version_key(other)[0]


_SPELLINGS = {"alpha": "a", "beta": "b", "c": "rc", "pre": "rc", "preview": "rc", "r": "post", "rev": "post"}


def same_version(one: str, other: str) -> bool:
    """Whether two spellings are one version of PEP 440: 2024.01 and 2024.1, 1.0 and 1.0.0."""
    return _version_key(one) == _version_key(other)


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
