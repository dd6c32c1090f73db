"""The suite as it goes into an image: its files, their digest, where they are mounted, what is expected."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from imagefactory import suite
from imagefactory.errors import UsageError
from imagefactory.model import BuildSpec, Target
from imagefactory.recipes.values import named_packages, parse_spec
from imagefactory.suite import table

SUITE_DIRECTORY = Path(suite.__file__).parent
SUITE_MOUNT, EXPECT_MOUNT, REPORT_MOUNT = (
    "/imagefactory/suite",
    "/imagefactory/expect",
    "/imagefactory/report",
)
EXPECTATIONS_NAME, REPORT_NAME = "expectations.json", "report.json"


@functools.cache
def read_suite() -> Mapping[str, bytes]:
    """The suite's files by relative name, without compiled ones; read once in a process."""
    return MappingProxyType(
        {
            path.relative_to(SUITE_DIRECTORY).as_posix(): path.read_bytes()
            for path in sorted(SUITE_DIRECTORY.rglob("*.py"))
            if path.is_file()
        }
    )


def digest_of(files: Mapping[str, bytes]) -> str:
    """sha256 over sorted names and contents, each with its length before it."""
    total = hashlib.sha256()
    for name in sorted(files):
        for part in (name.encode(), files[name]):
            total.update(len(part).to_bytes(8, "little") + part)
    return f"sha256:{total.hexdigest()}"


def suite_digest() -> str:
    """The digest by which a passed result names the suite that it passed."""
    return digest_of(read_suite())


def expectations(definition: BuildSpec) -> dict[str, Any]:
    """What the image must be, for the suite: pure, without nonce and user.

    Raises UsageError for a check the suite does not have, or not for this framework: of one that it does
    not know it checks what holds for every package.
    """
    target, lock = definition.target, definition.lock
    unknown = sorted(set(target.checks) - set(table.CHECKS))
    if unknown:
        raise UsageError(
            "check-unknown",
            f"{target.where}: unknown smoke test check '{unknown[0]}'",
            hint=f"known checks: {', '.join(table.CHECKS)}",
        )
    beyond = sorted(set(target.checks) - {*table.OTHER_CHECKS, *table.ASKED_CHECKS})
    if beyond and target.framework not in table.FRAMEWORKS:
        raise UsageError(
            "check-not-applicable",
            f"{target.where}: the smoke test has no check '{beyond[0]}' for '{target.framework}', only for "
            f"{', '.join(sorted(table.FRAMEWORKS))}",
            hint=f"write checks: [{', '.join(table.OTHER_CHECKS)}]",
        )
    packages = {wheel.name: wheel.version for wheel in lock.wheels}
    conda = {package.name: f"{package.version} {package.build}" for package in lock.conda}
    versions = {package.name: package.version for package in lock.packages}
    return {
        "format": table.FORMAT,
        "target": target.name,
        "framework": target.framework,
        "version": versions.get(target.framework, target.version),
        "cuda": target.cuda,
        "python": target.python,
        "packages": packages,
        "conda": conda,
        "checks": [name for name in table.CHECKS if name in target.checks],
        "named": sorted(named_names(target)),
    }


def named_names(target: Target) -> set[str]:
    """Return the names of all packages that the recipe names, from PyPI and from conda's channels."""
    specs = target.requirements if target.source == "conda" else ()
    return {*named_packages(target), *(parse_spec(text).name for text in specs)}


def required_checks(definition: BuildSpec) -> tuple[str, ...]:
    return tuple(name for name in table.CHECKS if name in definition.target.checks)


def write_suite(folder: Path, files: Mapping[str, bytes]) -> None:
    """A copy that every user can read, whatever this machine's umask: the bytes the digest speaks of."""
    for name, data in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        path.chmod(0o644)
    for path in (folder, *(path for path in folder.rglob("*") if path.is_dir())):
        path.chmod(0o755)
