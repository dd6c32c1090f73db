"""Write the rows of scanned.toml: `python -m imagefactory.actions.scan_wheels [OPTIONS] FILE.whl...`

Each file is scanned. Its row is printed, or with `--write` replaces the row of the same file in scanned.toml.
`--locks` adds the framework wheels of the project's locks that have no row yet, one download at a time.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path

from imagefactory.access import package_index, uv_locker
from imagefactory.errors import ImagefactoryError, UsageError, printable
from imagefactory.fs import replace_text
from imagefactory.gpu.frameworks import LibraryRole, find_framework, role_of
from imagefactory.gpu.knowledge.packages import WheelScan, parse_scanned, scanned
from imagefactory.gpu.values import GpuLibrary, ModuleCount, ScanResult
from imagefactory.lock.download import PackageCache
from imagefactory.lock.pypi.requirements import read_lock
from imagefactory.model import Lock, LockedWheel
from imagefactory.progress import Progress, choose_progress
from imagefactory.project import load_project
from imagefactory.scan.files import scan_wheel
from imagefactory.settings.load import load_settings
from imagefactory.versions import natural

_FILE = Path(__file__).parent.parent / "gpu" / "knowledge" / "scanned.toml"
_HEAD = """\
# What scans of framework wheels found. Made by `make scanned`; not edited by hand.
#
# package, version, file, sha256  the wheel
# facts                           what the framework says of its own build: framework, key, value
# source                          when it was scanned (every row has one; a test sees to it)
# library                         one that the framework must load or loads on demand; others are left out.
#                                 A wheel without any has no GPU code that counts
#   size                          in bytes
#   compressions                  of its fat binaries
#   unread                        entries that no scan can say anything of
#   modules                       how many of them hold code for exactly these targets
"""
_PACKAGES = re.compile(r"torch|tensorflow|jaxlib|jax-cuda\d+-(?:plugin|pjrt)|onnxruntime-gpu")


def required_libraries(contents: ScanResult) -> ScanResult:
    """Return a scan without the libraries that no other file needs."""
    framework = find_framework(contents)
    counted = (LibraryRole.GATES, LibraryRole.ON_DEMAND)
    libraries = tuple(
        library for library in contents.libraries if role_of(library.path, framework)[0] in counted
    )
    return replace(contents, libraries=libraries)


def format_wheels(wheels: Iterable[WheelScan]) -> str:
    """Return the text of scanned.toml with these rows, by package and version."""
    rows = sorted(wheels, key=lambda wheel: (wheel.package, natural(wheel.version), wheel.file))
    return "\n".join([_HEAD, *(format_wheel(wheel) for wheel in rows)])


def format_wheel(wheel: WheelScan) -> str:
    """Return a wheel as tables of TOML."""
    lines = ["[[wheel]]"]
    for key in ("package", "version", "file", "sha256"):
        lines.append(f"{key} = {_text(getattr(wheel, key))}")
    if wheel.contents.facts:
        facts = ", ".join(f"[{', '.join(map(_text, fact))}]" for fact in wheel.contents.facts)
        lines.append(f"facts = [{facts}]")
    lines.append(f"source = {_text(wheel.source)}")
    for library in wheel.contents.libraries:
        lines += ["", *_library_lines(library)]
    return "\n".join(lines) + "\n"


def _library_lines(library: GpuLibrary) -> Iterator[str]:
    yield "[[wheel.library]]"
    yield f"path = {_text(library.path)}"
    yield f"size = {library.size}"
    yield f"compressions = [{', '.join(map(_text, library.compressions))}]"
    if library.unread:
        yield f"unread = {_text(library.unread)}"
    if len(library.modules) == 1:
        yield f"modules = [{_text(_modules(library.modules[0]))}]"
        return
    yield "modules = ["
    for modules in sorted(library.modules, key=lambda row: (-row.count, row.codes)):
        yield f"    {_text(_modules(modules))},"
    yield "]"


def _modules(modules: ModuleCount) -> str:
    return " ".join([str(modules.count), *map(str, modules.codes)])


def _text(value: str) -> str:
    if not value.isprintable() or '"' in value or "\\" in value:
        raise UsageError(
            "wheel-text-invalid", f"scanned.toml cannot contain {value!a}", hint="do not pass this wheel"
        )
    return f'"{value}"'


def scan_wheel_row(path: Path, month: str, progress: Progress) -> WheelScan:
    """Return the row of a wheel. `month` is `2026-11`. Raises UsageError for a corrupt file."""
    contents = scan_wheel(path, progress, workers=2)
    damaged = [library for library in contents.libraries if library.damage]
    if damaged:
        raise UsageError(
            "wheel-corrupt",
            f"{path.name}: {damaged[0].path}: {damaged[0].damage}",
            hint="download the wheel again",
        )
    name, version = path.name.split("-")[:2]
    with path.open("rb") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    return WheelScan(
        package=name.lower().replace("_", "-"),
        version=version,
        file=path.name,
        sha256=sha256,
        contents=required_libraries(replace(contents, source=path.name, toolkit=())),
        source=f"measured {month}: scan of the wheel with this sha256",
    )


def main(arguments: list[str], month: str) -> int:
    parser = argparse.ArgumentParser(prog="scan_wheels", description="Make rows of scanned.toml.")
    parser.add_argument("--write", action="store_true", help="put the rows into scanned.toml")
    parser.add_argument("--locks", action="store_true", help="also the wheels of locks that have no row")
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE.whl")
    options = parser.parse_args(arguments)
    progress = choose_progress("plain")

    def take(wheel: WheelScan) -> None:
        if options.write:
            rows = {row.file: row for row in parse_scanned(_FILE.read_text(encoding="utf-8"))} | {
                wheel.file: wheel
            }
            replace_text(_FILE, format_wheels(rows.values()))
        else:
            print(printable(format_wheel(wheel)))

    try:
        for path in options.files:
            take(scan_wheel_row(path, month, progress))
        if options.locks:
            _scan_locks(month, progress, take)
    except ImagefactoryError as error:
        print(printable(f"{error.message}\n{error.hint}"), file=sys.stderr)
        return error.exit_code
    return 0


def _scan_locks(month: str, progress: Progress, take: Callable[[WheelScan], None]) -> None:
    project = load_project(load_settings(directory=None, start=Path.cwd(), environ=os.environ), os.environ)
    index = package_index(project)
    for lock, wheel in unscanned(project.lock_folder):

        def look_up(missing: tuple[LockedWheel, ...], lock: Lock = lock) -> dict[str, str]:
            return uv_locker(index).addresses(replace(lock, wheels=missing, conda=()))

        with tempfile.TemporaryDirectory(prefix="scan-wheels-") as folder:
            fetched = PackageCache(Path(folder), index).fetch((wheel,), look_up, progress)
            take(scan_wheel_row(fetched[wheel], month, progress))


def unscanned(folder: Path) -> list[tuple[Lock, LockedWheel]]:
    """Return the framework wheels in the locks of a directory that have no row, each with its lock."""
    by_sha256: dict[str, tuple[Lock, LockedWheel]] = {}
    for path in sorted(folder.glob("*.requirements.txt")):
        if path.with_name(path.name.replace(".requirements.txt", ".conda-lock.yml")).exists():
            continue  # wheels on conda packages: the framework is a conda package
        lock = read_lock(path)
        for wheel in lock.wheels:
            if _PACKAGES.fullmatch(wheel.name) and not scanned(wheel.sha256):
                by_sha256.setdefault(wheel.sha256, (lock, wheel))
    return list(by_sha256.values())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], f"{datetime.date.today():%Y-%m}"))
