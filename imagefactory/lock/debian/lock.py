"""The lock of a base: its Debian packages with versions and hashes, and its content hash.

It has no addresses, which depend on the machine.
"""

from __future__ import annotations

import hashlib
import json
import re
from functools import lru_cache
from itertools import pairwise
from pathlib import Path

from imagefactory.errors import LockError, os_problem
from imagefactory.fs import replace_text
from imagefactory.gpu.capability import PLATFORMS, architecture
from imagefactory.model import BaseLock, BaseSpec, DebianPackage

FORMAT = "imagefactory-base-lock 1"


# Every base has these besides the essential and the recipe's packages: apt, because people
# extend images manually, and the marker package that avoids the conversion to a merged /usr (and perl).
ALWAYS = ("apt", "usr-is-merged")

_PROCESSORS = "|".join(("all", *map(architecture, PLATFORMS)))
_PACKAGE = re.compile(
    r"([a-z0-9][a-z0-9+.-]+) ((?:[0-9]+:)?[0-9][A-Za-z0-9.+~-]*) "
    rf"({_PROCESSORS}) ([0-9a-f]{{64}}) ([1-9][0-9]{{0,11}})"
)
_HEADER = (
    ("format", re.escape(FORMAT)),
    ("base", r"[a-z][a-z0-9-]*"),
    ("suite", r"[a-z][a-z0-9-]*"),
    ("content-hash", r"sha256:[0-9a-f]{64}"),
    ("source-date-epoch", r"[1-9][0-9]{0,10}"),
)


def base_content_hash(base: BaseSpec, parent_base: BaseLock | None = None) -> str:
    """Return the hash of all inputs of a base's packages except the archive's state: `sha256:<64 hex>`.

    `parent_base` is the lock of the parent base. If that changes, this lock is outdated.
    """
    decided = {
        "format": FORMAT,
        "base": base.name,
        "suite": base.suite,
        "architecture": architecture(base.platform),
        "packages": sorted({*base.packages, *ALWAYS}),
        **(
            {
                "below": [
                    f"{package.name} {package.version} {package.sha256}" for package in parent_base.packages
                ]
            }
            if parent_base
            else {}
        ),
    }
    return "sha256:" + hashlib.sha256(json.dumps(decided, sort_keys=True).encode()).hexdigest()


def lock_architecture(lock: BaseLock) -> str:
    """Return the architecture of a base's packages by Debian's name (`arm64`)."""
    return next((package.architecture for package in lock.packages if package.architecture != "all"), "all")


def format_base_lock(lock: BaseLock) -> str:
    """Return the text of a lock: a header, an empty line, one line for each package, sorted by name."""
    values = (FORMAT, lock.base, lock.suite, lock.content_hash, lock.source_date_epoch)
    header = "".join(f"{name}: {value}\n" for (name, _), value in zip(_HEADER, values, strict=True))
    packages = sorted(lock.packages, key=lambda package: package.name)
    return "\n".join((header, "".join(map(format_package, packages))))


def format_package(package: DebianPackage) -> str:
    """Return the line of a package in a lock."""
    return f"{package.name} {package.version} {package.architecture} {package.sha256} {package.size}\n"


@lru_cache(maxsize=64)  # many targets are on one base
def parse_base_lock(text: str, file: str) -> BaseLock:
    """Return the lock in `text`. Raises LockError with `file:line` for malformed lines."""
    lines = text.split("\n")
    values = []
    for number, (name, pattern) in enumerate(_HEADER, 1):
        key, _, value = (lines[number - 1] if number <= len(lines) else "").partition(": ")
        if key != name or not re.fullmatch(pattern, value):
            raise _malformed(file, number, f"expected '{name}: ...', found '{value}'")
        values.append(value)
    if lines[5:6] != [""] or lines[-1] != "":
        raise _malformed(file, 6, "an empty line must follow the header and a newline end the file")
    packages = tuple(_package(line, number, file) for number, line in enumerate(lines[6:-1], 7))
    for number, (package, other) in enumerate(pairwise(packages), 8):
        if package.name >= other.name:
            raise _malformed(file, number, f"'{other.name}' is out of order or duplicate")
    if not packages:
        raise _malformed(file, 7, "the lock has no packages")
    if len(processors := {package.architecture for package in packages} - {"all"}) > 1:
        raise _malformed(file, 7, f"the lock mixes packages for {' and '.join(sorted(processors))}")
    return BaseLock(
        base=values[1],
        suite=values[2],
        content_hash=values[3],
        source_date_epoch=int(values[4]),
        packages=packages,
    )


def read_base_lock(path: Path) -> BaseLock | None:
    """Return the lock at `path`, None if there is no such file."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except OSError as error:
        raise LockError(*os_problem("read", path, error), hint="check its permissions") from error
    except UnicodeDecodeError as error:
        raise _malformed(
            str(path), error.object.count(b"\n", 0, error.start) + 1, "not UTF-8 text"
        ) from error
    return parse_base_lock(text, str(path))


def write_base_lock(path: Path, lock: BaseLock) -> None:
    """Write a lock atomically."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_text(path, format_base_lock(lock))
    except OSError as error:
        raise LockError(
            *os_problem("write", path, error), hint="check the disk space and the permissions"
        ) from error


def _package(line: str, number: int, file: str) -> DebianPackage:
    match = _PACKAGE.fullmatch(line)
    if not match:
        raise _malformed(file, number, f"expected 'name version architecture sha256 size', found '{line}'")
    name, version, processor, sha256, size = match.groups()
    return DebianPackage(name=name, version=version, architecture=processor, sha256=sha256, size=int(size))


def _malformed(file: str, number: int, message: str) -> LockError:
    return LockError(
        "lock-malformed",
        f"{file}:{number}: {message}",
        hint="restore the file from git, or write it again: imagefactory lock base:NAME",
    )


def deb_filename(package: DebianPackage) -> str:
    """Return the file name of a package in Debian's pool, without the version's epoch."""
    return f"{package.name}_{package.version.split(':', 1)[-1]}_{package.architecture}.deb"


def downloaded_filename(package: DebianPackage) -> str:
    """Return apt's file name for the same file."""
    return f"{package.name}_{package.version.replace(':', '%3a')}_{package.architecture}.deb"


Part = tuple[tuple[tuple[int, ...], int], ...]
Key = tuple[int, Part, Part]


def debian_key(version: str) -> Key:
    """Return the sort key of a version: epoch, upstream version, Debian revision.

    Source: Debian Policy 5.6.12, "Version". Raises ValueError for an epoch that is not a number.
    """
    epoch, colon, rest = version.partition(":")
    if not colon:
        epoch, rest = "0", version
    upstream, _, revision = rest.rpartition("-") if "-" in rest else (rest, "", "")
    return int(epoch), _part_key(upstream), _part_key(revision or "0")


def _part_key(text: str) -> Part:
    """Return a version's texts and numbers. A text's end sorts before letters, a tilde before the end."""
    parts = re.findall(r"([^0-9]*)([0-9]*)", text)
    return tuple(((*map(_weight, words), 0), int(digits or 0)) for words, digits in parts)


def _weight(letter: str) -> int:
    if letter == "~":
        return -1
    return ord(letter) if letter.isalpha() else ord(letter) + 256
