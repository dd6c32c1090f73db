"""The file of a conda lock: conda-lock's format, version 1, written and read in one form only.

The same lock has the same bytes. Errors name the line of any other input. conda-lock (in lock/export.py),
micromamba and pixi read the file too. Values without a field there (sizes, virtual packages, the solver) are
in `custom_metadata`.

Source of the format: conda_lock.lockfile.v1.models of conda-lock 4.0.3.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from urllib.parse import unquote

from imagefactory.errors import LockError
from imagefactory.gpu.capability import MACHINES, SUBDIRS
from imagefactory.lock.changes import FORMAT
from imagefactory.model import Lock, LockedCondaPackage
from imagefactory.recipes.values import parse_stored_cutoff

MAX_BYTES = 8 * 1024 * 1024
MAX_PACKAGES = 5_000

_TARGET = r"[a-z0-9]+(?:[._-][a-z0-9]+)*"
_CHANNEL = (
    r"(?:https?://[A-Za-z0-9.-]+(?::[0-9]{1,5})?|file://)(?:/(?!t/|\.{1,2}(?:/|$))[A-Za-z0-9._~%+,=!-]+)*"
)
_NAME = r"[a-z0-9_][a-z0-9_.-]{0,127}"
_VERSION = r"[A-Za-z0-9][A-Za-z0-9._+!]{0,99}"
_BUILD = r"[A-Za-z0-9_][A-Za-z0-9._+]{0,127}"
_FILE = r"[A-Za-z0-9_][A-Za-z0-9._+!%-]{0,250}\.(?:conda|tar\.bz2)"
_SYSTEM = r"__[a-z0-9_]{1,30}=[A-Za-z0-9][A-Za-z0-9._]{0,30}"
_SIZE = rf"{_FILE} [1-9][0-9]{{0,14}}"
_KEY = "    imagefactory."
_YAML_KEYWORDS = frozenset(["y", "n", "yes", "no", "on", "off", "true", "false", "null"])


def merge_depends(depends: Iterable[str]) -> tuple[str, ...]:
    """Return the match specs of `depends`, one for each name, sorted: the form in a lock.

    The format has a map of names, but a record may name one package twice (`hdf5 >=1.12.2`, `hdf5 *
    nompi_*`). Both bounds apply, so they become one spec (`hdf5 >=1.12.2 nompi_*`).
    """
    bounds: dict[str, list[str]] = {}
    for spec in depends:
        name, bound = _split_spec(spec)
        bounds.setdefault(name, []).append(bound)
    return tuple(f"{name} {_merge(bounds[name])}".rstrip() for name in sorted(bounds))


@lru_cache(maxsize=8192)
def _split_spec(spec: str) -> tuple[str, str]:
    """Return the name and bounds of a spec: `conda-forge::NumPy>=1.21, <2` -> ("numpy", ">=1.21,<2")."""
    match = re.fullmatch(r"\s*(?:[^\s\[]*::)?([A-Za-z0-9_.-]+)\s*(.*?)\s*", spec)
    if not match:
        return spec.strip(), ""
    return match[1].lower(), re.sub(r"\s*([,|])\s*|(?<=[<>=!~])\s+", r"\1", match[2])


def _merge(bounds: Sequence[str]) -> str:
    different = sorted(set(bounds) - {"", "*"})
    if len(different) < 2:
        return different[0] if different else ""
    versions: set[str] = set()
    builds: set[str] = set()
    for bound in different:
        version, _, build = bound.partition(" ")
        versions |= {version} - {"*"}
        builds |= {build.strip()} - {"", "*"}
    # `|` binds looser than `,`, so alternatives get brackets before a bound is added to them.
    parts = [f"({text})" if "|" in text and len(versions) > 1 else text for text in sorted(versions)]
    # Two builds of one package are the same build written twice, once as a pattern.
    build = min(builds, key=lambda text: ("*" in text, text), default="")
    return f"{','.join(parts) or '*'} {build}".strip()


def format_conda_lock(lock: Lock, pip: str = "") -> str:
    """Return the text of a lock's conda packages; `parse_conda_lock` is the inverse, without wheels.

    `pip` is the sha256 (64 hex) of its requirements file, empty for none, so that a change of only one of the
    two files is detected.
    """
    subdir = platform_subdir(lock)
    packages = (line for package in lock.conda for line in _package_lines(package, subdir))
    return "\n".join((*_head_lines(lock, pip), *packages)) + "\n"


def _head_lines(lock: Lock, pip: str) -> list[str]:
    """Return the lines before the first package."""
    subdir = platform_subdir(lock)
    system = " ".join(f"{name}={value}" for name, value in lock.virtual)
    metadata = [
        ("lock", str(FORMAT)),
        ("target", lock.target),
        ("python", lock.python),
        ("platform", lock.platform),
        ("solver", lock.solver),
        ("system", system),
        ("exclude-newer", str(lock.cutoff or "")),
        ("pip", pip),
        ("note", lock.note),
    ]
    lines = [
        f"# The conda packages of {lock.target}, in conda-lock's format, written by imagefactory.",
        f"# To make it anew: imagefactory lock {lock.target}",
        "# To install them elsewhere: micromamba create -n NAME -f THIS-FILE",
        *(f"# {line}" for line in _malformed_error(lock, pip)),
        f"version: {FORMAT}",
        "metadata:",
        "  content_hash:",
        f"    {subdir}: {_scalar(lock.content_hash.removeprefix('sha256:'))}",
        "  channels:",
    ]
    for channel in lock.channels:
        lines += [f"  - url: {_scalar(channel)}", "    used_env_vars: []"]
    lines += ["  platforms:", f"  - {subdir}", "  sources:", f"  - {_scalar(_recipe(lock.target))}"]
    lines += ["  custom_metadata:", *(f"{_KEY}{key}: {_scalar(value)}" for key, value in metadata if value)]
    lines.append(f"{_KEY}sizes: |")
    lines += sorted(f"      {package.filename} {package.size}" for package in lock.conda)
    return [*lines, "package:"]


def platform_subdir(lock: Lock) -> str:
    """Return conda's name of the lock's platform: `linux-64` for `manylinux_2_36_x86_64`."""
    return next(SUBDIRS[name] for name, machine in MACHINES.items() if lock.platform.endswith(f"_{machine}"))


def _malformed_error(lock: Lock, pip: str) -> list[str]:
    lines = [f"What comes from PyPI on top stands in {lock.target}.requirements.txt"] if pip else []
    bare = [package.name for package in lock.conda if not package.md5]
    if bare:
        lines.append(
            f"{len(bare)} of them have no md5, so conda-lock does not read this file; micromamba does"
        )
    return [*lines, f"Note: {lock.note}"] if lock.note else lines


def _recipe(target: str) -> str:
    """Return `recipes/pytorch.yaml` for `pytorch-2.3-cu121`: the family is the text before the version."""
    match = re.fullmatch(r"(.+)-[0-9][0-9a-z.]*-cu[0-9]+(?:-.+)?", target)
    return f"recipes/{match[1] if match else target}.yaml"


def _package_lines(package: LockedCondaPackage, subdir: str) -> list[str]:
    lines = [
        f"- name: {_scalar(package.name)}",
        f"  version: {_scalar(package.version)}",
        "  manager: conda",
        f"  platform: {subdir}",
    ]
    depends = [_split_spec(spec) for spec in merge_depends(package.depends)]
    lines.append("  dependencies:" if depends else "  dependencies: {}")
    lines += [f"    {_scalar(name)}: {_scalar(bound)}" for name, bound in depends]
    lines += [f"  url: {_scalar(package.url)}", "  hash:"]
    lines += [f"    md5: {_scalar(package.md5)}"] if package.md5 else []
    lines += [
        f"    sha256: {_scalar(package.sha256)}",
        f"  build: {_scalar(package.build)}",
        "  category: main",
        "  optional: false",
    ]
    return lines


@lru_cache(maxsize=8192)
def _scalar(text: str) -> str:
    """Return a text as YAML: plain if every YAML parser reads a text, else in single quotes."""
    bare = re.fullmatch(r"[A-Za-z_][A-Za-z0-9_./%+-]*(?:://[A-Za-z0-9_./%+:-]+)?", text)
    if bare and text.lower() not in _YAML_KEYWORDS and not text.endswith(":"):
        return text
    return "'" + text.replace("'", "''") + "'"


def pip_digest(text: str) -> str:
    """Return the sha256 of the requirements file that belongs to a lock, empty for none."""
    # Without `^`, which is tried at every character of 100 KB.
    match = re.search(rf"\n{re.escape(_KEY)}pip: '?([0-9a-f]{{64}})'?(?:\n|\Z)", text)
    return match[1] if match else ""


@lru_cache(maxsize=256)  # as `parse_lock` of wheels, and some targets are built on others
def parse_conda_lock(text: str, file: str) -> Lock:
    """Return the lock in `text`, without wheels. Errors name `file`.

    Raises LockError `file:line: problem` for a line that `format_conda_lock` would not write, a duplicate or
    misplaced package, a package of other channels or another platform, an address of another package, and
    for a truncated file.
    """
    reader = _LockReader(text, file)
    lock = _read_lock(reader)
    try:
        _check_lines(reader.lines, _head_lines(lock, pip_digest(text)))
    except _MalformedError as error:
        raise reader.fault(str(error), error.index) from None
    return lock


def _check_lines(lines: Sequence[str], expected_lines: Sequence[str]) -> None:
    for index, (line, expected) in enumerate(zip(lines, expected_lines, strict=False)):
        if line != expected:
            raise _MalformedError(f"expected {_printable(expected)}, found {_printable(line)}", index)


class _MalformedError(Exception):
    """A line, by its index, that `format_conda_lock` would not write."""

    def __init__(self, message: str, index: int) -> None:
        super().__init__(message)
        self.index = index


class _LineReader:
    """Lines that are read one after the other."""

    def __init__(self, lines: list[str]) -> None:
        self.lines, self.at = lines, 0

    @property
    def line(self) -> str:
        return self.lines[self.at] if self.at < len(self.lines) else ""

    def fault(self, message: str, index: int | None = None) -> Exception:
        return _MalformedError(message, self.at if index is None else index)

    def expect(self, line: str) -> None:
        if self.line != line:
            raise self.fault(f"expected {_printable(line)}, found {_printable(self.line)}")
        self.at += 1

    def value(self, start: str, pattern: str) -> str:
        """Return the scalar of a line that begins with `start`."""
        match = self.maybe(start, pattern)
        if match is None:
            raise self.fault(f"expected '{start.strip()} ...', found {_printable(self.line)}")
        return match

    def maybe(self, start: str, pattern: str) -> str | None:
        """Return the result of `value`, None if the line begins differently."""
        if not self.line.startswith(start):
            return None
        value = self.line[len(start) :]
        if len(value) > 1 and value[0] == value[-1] == "'":
            value = value[1:-1].replace("''", "'")
        if not re.fullmatch(pattern, value):
            location = f"after '{start.strip()}'" if start.strip() else "here"
            raise self.fault(f"{_printable(value)} is not a valid value {location}")
        self.at += 1
        return value


class _LockReader(_LineReader):
    """The lines of a file. Errors name the file."""

    def __init__(self, text: str, file: str) -> None:
        match = re.search(rf"^{re.escape(_KEY)}target: '?({_TARGET})'?$", text[:MAX_BYTES], re.MULTILINE)
        super().__init__([""])
        self.file, self.target = file, match[1] if match else "TARGET"
        if len(text) > MAX_BYTES:
            raise self.fault(f"the file is too large (at most {MAX_BYTES} characters)", 0)
        self.lines = text.split("\n")
        if self.lines[-1] != "":
            raise self.fault("the last line is incomplete", len(self.lines) - 1)
        while self.line.startswith("#"):
            self.at += 1

    def fault(self, message: str, index: int | None = None) -> LockError:
        line = (self.at if index is None else index) + 1
        return LockError(
            "lock-malformed", f"{self.file}:{line}: {message}", hint=f"run imagefactory lock {self.target}"
        )


def _read_lock(reader: _LockReader) -> Lock:
    version = reader.value("version: ", r"[0-9]+")
    if version != str(FORMAT):
        reader.at -= 1
        raise reader.fault(f"conda-lock format {version} is not supported (expected {FORMAT})")
    reader.expect("metadata:")
    reader.expect("  content_hash:")
    subdir = next((name for name in SUBDIRS.values() if reader.line.startswith(f"    {name}: ")), "linux-64")
    content_hash = reader.value(f"    {subdir}: ", r"[0-9a-f]{64}")
    reader.expect("  channels:")
    channels = []
    while (channel := reader.maybe("  - url: ", _CHANNEL)) is not None:
        reader.expect("    used_env_vars: []")
        channels.append(channel)
    reader.expect("  platforms:")
    reader.expect(f"  - {subdir}")
    reader.expect("  sources:")
    reader.value("  - ", r"recipes/[a-z0-9._-]+\.yaml")
    reader.expect("  custom_metadata:")
    known = reader.value(f"{_KEY}lock: ", r"[1-9][0-9]{0,3}")
    if known != str(FORMAT):
        reader.at -= 1
        raise reader.fault(f"lock format {known} is not supported (expected {FORMAT})")
    target = reader.value(f"{_KEY}target: ", _TARGET)
    python = reader.value(f"{_KEY}python: ", r"3\.[0-9]{1,2}")
    machine = next(MACHINES[platform] for platform, name in SUBDIRS.items() if name == subdir)
    platform = reader.value(f"{_KEY}platform: ", rf"manylinux_2_[0-9]{{1,2}}_{machine}")
    solver = reader.value(f"{_KEY}solver: ", r"[A-Za-z0-9][A-Za-z0-9 .,+_-]{0,120}")
    system = reader.maybe(f"{_KEY}system: ", rf"{_SYSTEM}(?: {_SYSTEM})*") or ""
    limit = reader.maybe(f"{_KEY}exclude-newer: ", r".{1,4000}")
    cutoff = parse_stored_cutoff(limit) if limit else None
    if limit and cutoff is None:
        reader.at -= 1
        raise reader.fault(f"{_printable(limit)} is not a time with packages")
    reader.maybe(f"{_KEY}pip: ", r"[0-9a-f]{64}")
    note = reader.maybe(f"{_KEY}note: ", r".{1,500}") or ""
    if not note.isprintable():
        reader.at -= 1
        raise reader.fault("the note has invisible characters")
    sizes = _read_sizes(reader)
    reader.expect("package:")
    packages: list[LockedCondaPackage] = []
    while reader.at < len(reader.lines) - 1:
        packages.append(_read_package(reader, packages, sizes, (subdir, channels)))
    if not packages:
        raise reader.fault("the lock has no packages")
    if len(packages) != len(sizes):
        more = min(sizes.keys() - {package.filename for package in packages})
        raise reader.fault(f"the file is incomplete: {more} has a size but no entry")
    return Lock(
        target=target,
        content_hash=f"sha256:{content_hash}",
        python=python,
        platform=platform,
        solver=solver,
        wheels=(),
        conda=tuple(packages),
        channels=tuple(channels),
        virtual=tuple((name, value) for name, _, value in (entry.partition("=") for entry in system.split())),
        note=note,
        cutoff=cutoff,
    )


def _read_sizes(reader: _LockReader) -> dict[str, int]:
    reader.expect(f"{_KEY}sizes: |")
    sizes: dict[str, int] = {}
    while (row := reader.maybe("      ", _SIZE)) is not None:
        name, _, size = row.partition(" ")
        sizes[name] = int(size)
        if len(sizes) > MAX_PACKAGES:
            raise reader.fault(f"the lock has more than {MAX_PACKAGES} packages")
    return sizes


def _read_package(
    reader: _LockReader,
    before: Sequence[LockedCondaPackage],
    sizes: Mapping[str, int],
    location: tuple[str, Sequence[str]],
) -> LockedCondaPackage:
    """Read the next package, which must follow those of `before` in order."""
    platform, channels = location
    start, lines = reader.at, reader.lines
    end = next((i for i in range(start + 1, len(lines) - 1) if lines[i].startswith("- ")), len(lines) - 1)
    text = "\n".join(lines[start:end])
    try:
        package = _parse_package(text, platform)
    except _MalformedError as error:
        _check_order(reader, before, reader.value("- name: ", _NAME), start)
        raise reader.fault(str(error), start + error.index) from None
    _check_order(reader, before, package.name, start)
    url_line = lines.index(f"  url: {_scalar(package.url)}", start)
    if package.url.rsplit("/", 2)[0] not in channels:
        raise reader.fault(f"{package.url} is not in the lock's channels", url_line)
    if package.filename not in sizes:
        raise reader.fault(f"{package.filename} has no size in 'imagefactory.sizes'", url_line)
    reader.at = end
    return _sized_package(text, platform, sizes[package.filename])


@lru_cache(maxsize=4096)
def _sized_package(text: str, platform: str, size: int) -> LockedCondaPackage:
    return replace(_parse_package(text, platform), size=size)


def _check_order(reader: _LockReader, before: Sequence[LockedCondaPackage], name: str, index: int) -> None:
    if before and name <= before[-1].name:
        twice = name == before[-1].name
        raise reader.fault(
            f"'{name}' is duplicate" if twice else f"'{name}' must come before '{before[-1].name}'", index
        )


@lru_cache(maxsize=4096)  # targets share most of their packages
def _parse_package(text: str, platform: str) -> LockedCondaPackage:
    """Return the package of an entry, without its size. Raises _MalformedError."""
    reader = _LineReader(text.split("\n"))
    name = reader.value("- name: ", _NAME)
    version = reader.value("  version: ", _VERSION)
    reader.expect("  manager: conda")
    reader.expect(f"  platform: {platform}")
    depends = []
    if reader.line == "  dependencies: {}":
        reader.at += 1
    else:
        reader.expect("  dependencies:")
        while match := re.fullmatch(rf"    '?({_NAME})'?: (.*)", reader.line):
            bound = reader.value(f"    {_scalar(match[1])}: ", r"(?:[!-~](?:[ -~]{0,298}[!-~])?)?")
            depends.append(f"{match[1]} {bound}".rstrip())
    line_number = reader.at
    url = reader.value("  url: ", rf"{_CHANNEL}/[a-z0-9-]+/{_FILE}")
    _, subdir, filename = url.rsplit("/", 2)
    reader.expect("  hash:")
    md5 = reader.maybe("    md5: ", r"[0-9a-f]{32}") or ""
    sha256 = reader.value("    sha256: ", r"[0-9a-f]{64}")
    build = reader.value("  build: ", _BUILD)
    reader.expect("  category: main")
    reader.expect("  optional: false")
    if reader.at < len(reader.lines):
        raise reader.fault(f"expected '- name: ...', found {_printable(reader.line)}")
    if subdir not in (platform, "noarch"):
        raise reader.fault(f"{url} is not for {platform}", line_number)
    stem = unquote(filename).removesuffix(".conda").removesuffix(".tar.bz2")
    if stem.lower() != f"{name}-{version}-{build}".lower():
        raise reader.fault(f"'{filename}' is not {name} {version} {build}", line_number)
    package = LockedCondaPackage(
        name=name,
        version=version,
        build=build,
        subdir=subdir,
        url=url,
        filename=filename,
        sha256=sha256,
        md5=md5,
        size=0,
        depends=tuple(depends),
    )
    _check_lines(reader.lines, _package_lines(package, platform))
    return package


def _printable(line: str) -> str:
    return repr(line if len(line) <= 80 else line[:77] + "...") if line else "nothing"
