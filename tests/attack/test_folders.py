"""Folders that images, builds and jobs left: every reader takes a regular file of its own, or refuses.

What lies outside says SECRET: no reader gives it out, blocks on a FIFO, or reads a hole to its end.
"""

from __future__ import annotations

import json
import os
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import chdir, contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from imagefactory.build.conda import prefix
from imagefactory.errors import ImagefactoryError
from imagefactory.extras.emulate import run
from imagefactory.extras.portability import run as portable
from imagefactory.extras.wheels import build as compiling
from imagefactory.lock.pypi import sources
from imagefactory.schedulers.htcondor.node import post
from imagefactory.serialize import ObjectSchema
from imagefactory.trees import list_names, read_file, remove_tree, tree_bytes, walk_tree
from imagefactory.verify.kit import program
from imagefactory.verify.kits import read_nonce, read_returned_kit
from imagefactory.verify.outcome import InvalidReportError, parse_fields, read_report
from tests.attack.ground import ground
from tests.made.emulated import TOLD
from tests.made.mutants import HOSTILE
from tests.made.values import make_lock, make_target
from tests.made.wheels import make_wheel

SECRET = "SECRET of somebody else"
REPORT = json.dumps({"nonce": SECRET, "rows": []})
WHEEL = "ops-1.0-py3-none-any.whl"
NAMES = st.sampled_from(
    (
        *("report.json", "7.json", "net.onnx", "net.npz", WHEEL, "kit.json", "expectations.json", "run.json"),
        *("evidence.json", "pyproject.toml", "setup.py", "a.py", "x" * 255, ".work-1"),
        *(name for name in HOSTILE if name and "/" not in name and "\0" not in name and name.isprintable()),
        "a\x1b[2J\n",
    )
)
FOLDERS = st.lists(st.sampled_from(("result", "suite", "build", "a", "b")), max_size=3)
TARGETS = st.sampled_from(
    (
        *("../outside", "../../outside", "outside/report.json", "../outside/report.json", "/dev/zero", "/"),
        *("/proc/self/fd/0", "/dev/stdin", ".", "..", "a", "a/..", "../folder/a", "loop", "report.json"),
    )
)
CONTENTS = st.sampled_from(
    (
        *(b"", b"{}", b"[" * 100_000, b'{"a":' * 5000, b"\xff\xfe", json.dumps(TOLD).encode(), b"1" * 10_000),
        *(b'{"nonce": "n", "format": 1}', b"[build-system]\nrequires = ['a']\n", b"a = " + b"[" * 5000),
    )
)
KINDS = st.sampled_from(("file", "file", "link", "link", "fifo", "socket", "hole", "hard", "deep", "wheel"))
ENTRIES = st.lists(st.tuples(FOLDERS, NAMES, KINDS, TARGETS, CONTENTS), max_size=12)


def fill(folder: Path, entries: list[tuple[list[str], str, str, str, bytes]]) -> None:
    """Makes what it can of the entries: one may stand in another's way."""
    for folders, name, kind, target, content in entries:
        place = folder.joinpath(*folders)
        with suppress(OSError, UnicodeEncodeError, StopIteration):
            if any(above.is_symlink() for above in (place, *place.parents) if above.is_relative_to(folder)):
                continue
            place.mkdir(parents=True, exist_ok=True)
            path = place / name
            if os.path.lexists(path):
                continue
            if kind == "file":
                path.write_bytes(content)
            elif kind == "link":
                path.symlink_to(target)
            elif kind == "fifo":
                os.mkfifo(path)
            elif kind == "socket":
                with chdir(place), socket.socket(socket.AF_UNIX) as made:
                    made.bind(name)
            elif kind == "hole":
                path.touch()
                os.truncate(path, 1 << 43)
            elif kind == "hard":
                path.hardlink_to(next(one for one in place.iterdir() if one.is_file()))
            elif kind == "wheel":
                with TemporaryDirectory(dir=folder.parent) as own:
                    make_wheel(Path(own), "ops", {"ops.py": content}).rename(path)
            else:
                with chdir(place):
                    for _ in range(300):
                        Path(name).mkdir()
                        os.chdir(name)


def took_report(folder: Path) -> object:
    with suppress(InvalidReportError):
        data = read_report(folder / "report.json")
        return data, parse_fields(data, ObjectSchema(nonce=object, rows=object))
    return None


def took_wheel(folder: Path) -> object:
    scratch = folder.parent / "scratch"
    scratch.mkdir()
    folder.rename(scratch / "out")
    try:
        asked = compiling.CompileRequest(source="ops", target=make_target(), folder=folder)
        source = compiling._WheelSource(path=folder, identity="")
        row = compiling._take_wheel(asked, source, make_lock(), scratch, 1 << 20)
        return (scratch / "wheel" / row.filename).read_bytes()
    finally:
        (scratch / "out").rename(folder)
        remove_tree(scratch)


def took_source(folder: Path) -> object:
    copy = folder.parent / "copy"
    try:
        sources.copy_source(folder, copy, 1 << 20)
        sources.read_project(copy)
        return [path.read_bytes() for path in copy.rglob("*") if path.is_file()]
    finally:
        remove_tree(copy)


def took_emulated(folder: Path) -> object:
    runs = run.read_emulation_summaries(folder)
    output = folder.parent / "summary"
    try:
        run.write_emulation_summary(folder, runs, output)
        return runs, output.read_bytes()
    finally:
        output.unlink(missing_ok=True)


def walked(folder: Path) -> object:
    with suppress(OSError):
        prefix._listing(folder, 1000)
    with suppress(OSError):
        return [
            read_file(folder, name, 1 << 20) for name in list_names(folder, 20) if not name.endswith(".whl")
        ]
    return tree_bytes(folder), sum(1 for _ in walk_tree(folder))


READERS: dict[str, Callable[[Path], object]] = {
    "report": took_report,
    "kit's own": lambda folder: [program.read_report(folder, f"result/{name}") for name in ("run.json", "a")],
    "kit": lambda folder: (read_nonce(folder), read_returned_kit(folder)),
    "kit's suite": lambda folder: program.read_kit(folder),
    "emulated": took_emulated,
    "model": lambda folder: [portable.check_file(folder, f"net.{end}", "x") for end in ("onnx", "npz")],
    "wheel": took_wheel,
    "source": took_source,
    "walk": walked,
    "node": lambda folder: post.is_valid_run(folder),
}


class BlockedError(Exception):
    """A reader waits, or reads without end."""


@contextmanager
def seconds(number: int) -> Iterator[None]:
    def stop(*_: object) -> None:
        raise BlockedError

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(number)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("reader", sorted(READERS))
@settings(max_examples=50)  # ten readers
@given(entries=ENTRIES)
def test_a_folder_is_read_inside_and_to_an_end(
    reader: str, entries: list[tuple[list[str], str, str, str, bytes]]
) -> None:
    with ground() as place:
        outside, folder = place / "outside", place / "folder"
        for path in (outside, folder):
            path.mkdir()
        for name in ("report.json", "run.json", "7.json", "pyproject.toml", "a.py", "net.onnx"):
            (outside / name).write_text(REPORT)
        make_wheel(outside, "ops", {"ops.py": SECRET.encode()})
        with seconds(20):
            fill(folder, entries)
        before = len(list(Path("/proc/self/fd").iterdir()))
        with seconds(20), suppress(ImagefactoryError, program.Stop):
            assert SECRET not in str(READERS[reader](folder))
        assert len(list(Path("/proc/self/fd").iterdir())) == before
        remove_tree(folder)
        assert {path.name for path in place.iterdir()} == {"outside"}
        remove_tree(outside)
