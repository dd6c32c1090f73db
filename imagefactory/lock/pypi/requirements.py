"""The file of a lock of wheels.

It is a requirements file without addresses, so pip and uv install it without imagefactory. A wheel from
another index has that index's name, `# wheel: FILE BYTES from NAME`, and a wheel of the project its path. A
wheel whose publisher the index attests ends with it: `by GitHub numpy/numpy release.yml`.
"""

from __future__ import annotations

import hashlib
import re
from functools import lru_cache
from pathlib import Path
from typing import Any

from packaging import tags
from packaging.utils import InvalidWheelFilename, parse_wheel_filename
from packaging.version import InvalidVersion, Version

from imagefactory.errors import LockError, os_problem
from imagefactory.gpu.capability import MACHINES
from imagefactory.lock.changes import FORMAT
from imagefactory.model import Lock, LockedWheel, OwnFile
from imagefactory.recipes.values import RULES, parse_stored_cutoff


@lru_cache(maxsize=32)
def fitting_tags(python: str, platform: str) -> tuple[tags.Tag, ...]:
    """Return the wheel tags that CPython `python` installs on `platform`, best first.

    `platform` is `manylinux_2_36_x86_64`: a wheel for this glibc or an older one fits. Sources: PEP 425, PEP
    600 with its aliases for the older names, and packaging's order.
    """
    match = re.fullmatch(r"manylinux_2_([0-9]+)_(\w+)", platform)
    if not match:
        raise ValueError(f"not a manylinux platform: {platform}")
    machine, oldest = match[2], 5 if match[2] == "x86_64" else 17
    older_names = {17: "manylinux2014", 12: "manylinux2010", 5: "manylinux1"}
    platforms = []
    for minor in range(int(match[1]), oldest - 1, -1):
        platforms.append(f"manylinux_2_{minor}_{machine}")
        if minor in older_names:
            platforms.append(f"{older_names[minor]}_{machine}")
    platforms.append(f"linux_{machine}")
    major, _, minor_text = python.partition(".")
    version, interpreter = (int(major), int(minor_text)), f"cp{major}{minor_text}"
    abi = interpreter + ("m" if version < (3, 8) else "")  # PEP 425: built with pymalloc
    return (
        *tags.cpython_tags(version, abis=[abi], platforms=platforms),
        *tags.compatible_tags(version, interpreter=interpreter, platforms=platforms),
    )


@lru_cache(maxsize=32)
def fitting_set(python: str, platform: str) -> frozenset[tags.Tag]:
    """Return `fitting_tags` as a set: a wheel has few tags, and hundreds fit."""
    return frozenset(fitting_tags(python, platform))


_HEADER = (  # in the file's order; each value must fully match
    ("imagefactory lock", r"[1-9][0-9]{0,3}"),
    ("target:", r"[a-z0-9]+(?:[._-][a-z0-9]+)*"),
    ("content-hash:", r"sha256:[0-9a-f]{64}"),
    ("python:", r"3\.[0-9]{1,2}"),
    ("platform:", rf"manylinux_2_[0-9]{{1,2}}_(?:{'|'.join(MACHINES.values())})"),
    ("solver:", r"[A-Za-z0-9][A-Za-z0-9 .+_-]{0,60}"),
    ("packages:", r"[1-9][0-9]{0,4}"),
    ("to make it anew:", r"imagefactory lock [a-z0-9]+(?:[._-][a-z0-9]+)*"),
)
_CUTOFF = "# exclude-newer: "
_PUBLISHER = r"[A-Za-z]{1,20}(?: [A-Za-z0-9._/@+:%-]{1,300}){1,2}"
PUBLISHERS = rf"{_PUBLISHER}(?:, {_PUBLISHER}){{0,3}}"
"""The text of a file's publishers in a lock."""
_WHEEL = re.compile(
    r"# wheel: ([A-Za-z0-9][A-Za-z0-9._+!-]{0,250}\.whl) ([1-9][0-9]{0,14})(?: from (\S+))?"
    rf"(?: by ({PUBLISHERS}))?"
)
_PIN = re.compile(r"([a-z0-9]+(?:-[a-z0-9]+)*)==([A-Za-z0-9.+!_-]{1,100}) --hash=sha256:([0-9a-f]{64})")


def format_lock(lock: Lock) -> str:
    """Return the text of a lock; `parse_lock` is the inverse."""
    values = (
        str(FORMAT),
        lock.target,
        lock.content_hash,
        lock.python,
        lock.platform,
        lock.solver,
        str(len(lock.wheels)),
        f"imagefactory lock {lock.target}",
    )
    lines = [f"# {key} {value}" for (key, _), value in zip(_HEADER, values, strict=True)]
    lines += [f"{_CUTOFF}{lock.cutoff}"] if lock.cutoff else []
    origins, publishers = dict(lock.origins), dict(lock.publishers)
    for wheel in lock.wheels:
        origin = f" from {origins[wheel.name]}" if wheel.name in origins else ""
        publisher = f" by {publishers[wheel.name]}" if wheel.name in publishers else ""
        lines.append(f"# wheel: {wheel.filename} {wheel.size}{origin}{publisher}")
        lines.append(f"{wheel.name}=={wheel.version} --hash=sha256:{wheel.sha256}")
    return "\n".join(lines) + "\n"


@lru_cache(maxsize=256)  # a command reads a target's lock several times
def parse_lock(text: str, file: str) -> Lock:
    """Return the lock in `text`. Errors name `file`.

    Raises LockError `file:line: problem` for a line that `format_lock` would not write, a duplicate or
    misplaced package, a file that is not a wheel of this package and version or does not fit the lock's
    Python and platform, and for a truncated file.
    """
    lines = text.split("\n")
    target = _between(lines[1] if len(lines) > 1 else "", "# target: ")

    def fault(index: int, message: str) -> LockError:
        known = re.fullmatch(_HEADER[1][1], target)
        return LockError(
            "lock-malformed",
            f"{file}:{index + 1}: {message}",
            hint=f"run imagefactory lock {target if known else 'TARGET'}",
        )

    header = []
    for index, (key, pattern) in enumerate(_HEADER):
        line = lines[index] if index < len(lines) else ""
        value = _between(line, f"# {key} ")
        if not re.fullmatch(pattern, value):
            raise fault(index, f"expected '# {key} ...', found {_quote(line)}")
        if index == 0 and value != str(FORMAT):
            raise fault(0, f"lock format {value} is not supported (expected {FORMAT})")
        header.append(value)
    _, _, content_hash, python, platform, solver, count, remake = header
    if remake != f"imagefactory lock {target}":
        raise fault(len(_HEADER) - 1, f"the target is not '{target}'")
    if lines[-1] != "":
        raise fault(len(lines) - 1, "the last line is incomplete")

    first, cutoff = len(_HEADER), None
    if lines[first].startswith(_CUTOFF):
        cutoff = parse_stored_cutoff(lines[first].removeprefix(_CUTOFF))
        if cutoff is None:
            raise fault(first, f"expected '{_CUTOFF}TIME', found {_quote(lines[first])}")
        first += 1
    wheels: list[LockedWheel] = []
    origins: list[tuple[str, str]] = []
    publishers: list[tuple[str, str]] = []
    for index in range(first, len(lines) - 1, 2):
        wheel, origin, publisher = _parse_wheel(lines[index : index + 2], index, fault)
        if fits_not := misfit(wheel, python, platform):
            raise fault(index, fits_not)
        if wheels and wheel.name == wheels[-1].name:
            raise fault(index + 1, f"'{wheel.name}' is duplicate")
        if wheels and wheel.name < wheels[-1].name:
            raise fault(index + 1, f"'{wheel.name}' must come before '{wheels[-1].name}'")
        wheels.append(wheel)
        if origin:
            origins.append((wheel.name, origin))
        if publisher:
            publishers.append((wheel.name, publisher))
    if len(wheels) != int(count):
        raise fault(len(lines) - 1, f"expected {count} packages, found {len(wheels)}")
    return Lock(
        target=target,
        content_hash=content_hash,
        python=python,
        platform=platform,
        solver=solver,
        wheels=tuple(wheels),
        origins=tuple(origins),
        cutoff=cutoff,
        publishers=tuple(publishers),
    )


def read_lock(path: Path) -> Lock:
    """Return the lock in a file. Raises LockError for a missing, unreadable or malformed file."""
    return parse_lock(read_text(path), str(path))


def read_text(path: Path) -> str:
    """Return the text of a lock file. Raises LockError if it is missing, unreadable or not UTF-8."""
    try:
        return path.read_bytes().decode("utf-8")
    except FileNotFoundError as error:
        target = path.name.removesuffix(".requirements.txt")
        raise LockError(
            "lock-missing", f"{path} does not exist", hint=f"run imagefactory lock {target}"
        ) from error
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise LockError(
            "lock-malformed", f"{path}:{line}: not UTF-8 text", hint="run imagefactory lock TARGET"
        ) from error
    except OSError as error:
        raise LockError(*os_problem("read", path, error), hint="check its permissions") from error


def _between(line: str, prefix: str) -> str:
    return line.removeprefix(prefix) if line.startswith(prefix) else ""


def _quote(line: str) -> str:
    return repr(line if len(line) <= 80 else line[:77] + "...") if line else "nothing"


def _parse_wheel(pair: list[str], index: int, fault: Any) -> tuple[LockedWheel, str, str]:
    described, pin = pair[0], pair[1] if len(pair) > 1 else ""
    first = _WHEEL.fullmatch(described)
    if not first:
        if re.match(r"# wheel: \S+\.(tar\.gz|zip|tar\.bz2) ", described):
            raise fault(index, "this is a source distribution, and images contain only wheels")
        raise fault(index, f"expected '# wheel: FILE.whl BYTES', found {_quote(described)}")
    origin = first[3] or ""
    if origin.startswith("./"):
        if not RULES["wheel"].allows(origin) or origin.rpartition("/")[2] != first[1]:
            raise fault(index, f"{_quote(origin)} is not the path of {first[1]}")
    elif origin and not RULES["index name"].allows(origin):
        raise fault(index, f"{_quote(origin)} is not the name of an index")
    second = _PIN.fullmatch(pin)
    if not second:
        raise fault(index + 1, f"expected 'name==version --hash=sha256:<64 hex>', found {_quote(pin)}")
    wheel = LockedWheel(
        name=second[1],
        version=second[2],
        filename=first[1],
        sha256=second[3],
        size=int(first[2]),
    )
    return wheel, origin, first[4] or ""


@lru_cache(maxsize=4096)  # targets share most of their wheels
def misfit(wheel: LockedWheel, python: str, platform: str) -> str:
    """Return why a wheel's file name does not fit its pin, Python and platform; empty if it does."""
    try:
        name, version, _, offered = parse_wheel_filename(wheel.filename)
        pinned = Version(wheel.version)
    except InvalidWheelFilename as error:
        return f"'{wheel.filename}' is not a wheel file name: {error}"
    except InvalidVersion as error:
        return str(error)
    if (name, version) != (wheel.name, pinned):
        return f"'{wheel.filename}' is not {wheel.name} {wheel.version}"
    if offered.isdisjoint(fitting_set(python, platform)):
        return f"'{wheel.filename}' does not fit Python {python} on {platform}"
    return ""


Origins = tuple[tuple[str, str], ...]


def from_indexes(origins: Origins) -> dict[str, str]:
    """Return the origins that are names of indexes, by package."""
    return {name: origin for name, origin in origins if not origin.startswith("./")}


def from_files(origins: Origins) -> dict[str, str]:
    """Return the origins that are paths of wheels, by package."""
    return {name: origin for name, origin in origins if origin.startswith("./")}


# --- Wheels in the project itself: whether the files have changed


def changed_wheel(lock: Lock, root: Path) -> str:
    """Return how a wheel below `root` differs from the lock, empty if none differs."""
    paths = from_files(lock.origins)
    for wheel in lock.wheels:
        if path := paths.get(wheel.name):
            file = root / path
            if not file.is_file():
                return f"{path} is not there any more"
            if not file.resolve().is_relative_to(root.resolve()):
                return f"{path} is a link out of {root}"
            if digest(file) != wheel.sha256:
                return f"{path} has changed since"
    return ""


def local_files(lock: Lock, root: Path) -> tuple[OwnFile, ...]:
    """Return the wheels below `root` by their file names."""
    paths = from_files(lock.origins)
    return tuple(
        OwnFile(
            path=wheel.filename,
            source=root / paths[wheel.name],
            sha256=wheel.sha256,
            size=wheel.size,
            executable=False,
        )
        for wheel in lock.wheels
        if wheel.name in paths
    )


def digest(file: Path) -> str:
    """Return the sha256 of a file, read once per process while it does not change."""
    state = file.stat()
    return _digest(file, state.st_mtime_ns, state.st_size)


@lru_cache(maxsize=64)
def _digest(file: Path, _changed: int, _size: int) -> str:
    with file.open("rb") as file_handle:
        return hashlib.file_digest(file_handle, "sha256").hexdigest()
