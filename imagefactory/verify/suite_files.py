"""The suite in an image: its files, their digest, where they are mounted, the expectations."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from imagefactory import suite
from imagefactory.errors import UsageError
from imagefactory.model import BuildSpec, Mount
from imagefactory.recipes.values import named_packages, parse_spec
from imagefactory.suite import table

SUITE_DIRECTORY = Path(suite.__file__).parent
INSIDE = "/imagefactory"
SUITE_MOUNT, EXPECT_MOUNT, REPORT_MOUNT = f"{INSIDE}/suite", f"{INSIDE}/expect", f"{INSIDE}/report"
EARLIER_SUITES = ("sha256:ff585f1efcc515e5bde48321836d824624f6e69da9313b0c335ba2b7b73a028e",)
"""Suites that make the same checks of one GPU as this one, so their verdicts count too."""
EXPECTATIONS_NAME, REPORT_NAME = "expectations.json", "report.json"


@functools.cache
def read_suite() -> Mapping[str, bytes]:
    """Return the suite's source files by relative name; read once in a process."""
    return MappingProxyType(
        {
            path.relative_to(SUITE_DIRECTORY).as_posix(): path.read_bytes()
            for path in sorted(SUITE_DIRECTORY.rglob("*.py"))
            if path.is_file()
        }
    )


def digest_of(files: Mapping[str, bytes]) -> str:
    """Return the sha256 over sorted names and contents, each after its length."""
    total = hashlib.sha256()
    for name in sorted(files):
        for part in (name.encode(), files[name]):
            total.update(len(part).to_bytes(8, "little") + part)
    return f"sha256:{total.hexdigest()}"


def suite_digest() -> str:
    """Return the digest of the suite in results."""
    return digest_of(read_suite())


def expectations(definition: BuildSpec) -> dict[str, Any]:
    """Return the requirements of the image for the suite, without nonce and user. Pure.

    Raises UsageError for a check that the suite does not have, or not for this framework: for an unknown one
    there are only the checks for every package.
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
            f"{target.where}: the smoke test check '{beyond[0]}' does not apply to '{target.framework}', "
            "only to "
            f"{', '.join(sorted(table.FRAMEWORKS))}",
            hint=f"write checks: [{', '.join(table.OTHER_CHECKS)}]",
        )
    versions = {package.name: package.version for package in lock.packages}
    specs = target.requirements if target.source == "conda" else ()
    return {
        "format": table.FORMAT,
        "target": target.name,
        "framework": target.framework,
        "version": versions.get(target.framework, target.version),
        "cuda": target.cuda,
        "python": target.python,
        "packages": {wheel.name: wheel.version for wheel in lock.wheels},
        "conda": {package.name: f"{package.version} {package.build}" for package in lock.conda},
        "checks": [name for name in table.CHECKS if name in target.checks],
        "named": sorted({*named_packages(target), *(parse_spec(text).name for text in specs)}),
    }


def required_checks(definition: BuildSpec) -> tuple[str, ...]:
    return tuple(name for name in table.CHECKS if name in definition.target.checks)


def suite_argv(definition: BuildSpec, entry: str = "verify.py") -> tuple[str, ...]:
    """Return the command that runs the suite's program `entry` inside the image."""
    return (
        f"{definition.prefix}/bin/python",
        "-I",
        "-B",
        f"{SUITE_MOUNT}/{entry}",
        f"{EXPECT_MOUNT}/{EXPECTATIONS_NAME}",
        f"{REPORT_MOUNT}/{REPORT_NAME}",
    )


def suite_mounts(suite: Path, directory: Path, request: Mapping[str, Any]) -> tuple[Mount, ...]:
    """Write the expectations and create the report's folder below `directory`. Return a run's mounts."""
    write_suite(
        directory / "expect", {EXPECTATIONS_NAME: json.dumps(request, indent=1, sort_keys=True).encode()}
    )
    report = directory / "report"
    report.mkdir()
    # The image's user writes here, with any uid on the host; the parent directory is closed to others.
    report.chmod(0o777)
    return (
        Mount(source=suite, target=SUITE_MOUNT, bind=True),
        Mount(source=directory / "expect", target=EXPECT_MOUNT, bind=True),
        Mount(source=report, target=REPORT_MOUNT, writable=True, scratch=True),
    )


def write_suite(directory: Path, files: Mapping[str, bytes]) -> None:
    """Write files that every user can read, whatever the umask, with the bytes of the digest."""
    for name, data in files.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        path.chmod(0o644)
    for path in (directory, *(path for path in directory.rglob("*") if path.is_dir())):
        path.chmod(0o755)
