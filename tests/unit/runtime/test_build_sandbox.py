"""What a build's sandbox is made of, and what its failures become."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from imagefactory.errors import BuildError, ImagefactoryError, ToolError
from imagefactory.runtime.build_sandbox import explain_failure, prepare_directory
from imagefactory.runtime.limits import RunLimits
from imagefactory.runtime.sandbox import syscalls

LIMITS = RunLimits(processes=4096, memory=1 << 30, files=9, reserve=5 << 30)


@pytest.mark.parametrize(
    ("report", "kind", "word"),
    [
        ({"over": "processes"}, BuildError, "processes=4096"),
        ({"over": "memory"}, BuildError, "memory=1G"),
        ({"over": "reserve"}, BuildError, "disk"),
        ({"step": "user-namespace", "errno": 1, "detail": "x"}, ToolError, "user-namespace: x"),
        ({"step": "helper", "errno": 0, "detail": "it was killed"}, ToolError, "it was killed"),
    ],
)
def test_what_a_failure_becomes(report: dict[str, object], kind: type[ImagefactoryError], word: str) -> None:
    error = explain_failure(report, LIMITS)
    assert isinstance(error, kind)
    assert word in error.message
    assert error.hint


def test_a_builds_folder_is_closed_to_others_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        prepare_directory(tmp_path)
    finally:
        os.umask(before)
    modes = {path.name: path.stat().st_mode & 0o7777 for path in tmp_path.iterdir()}
    assert modes == {"tree": 0o1777, "input": 0o755}
    assert tmp_path.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("machine", syscalls.ARCHITECTURES)
def test_a_builds_filter_denies_all_but_setuid_files(machine: str) -> None:
    """dpkg unpacks some, su among them. It need not wait for the disk."""
    whole, build = (syscalls.seccomp_program(machine, build=build) for build in (False, True))
    skipped = (syscalls.RETURN, 0, 0, syscalls.NOTHING_DONE)
    for name in syscalls.SYNCS:
        test = (syscalls.JUMP_EQUAL, 0, 1, syscalls.ARCHITECTURES[machine][name])
        assert build[build.index(test) + 1] == skipped
        assert test not in whole
    assert [instruction for instruction in whole if instruction[0] == syscalls.JUMP_ANY_BIT]
    assert not [instruction for instruction in build if instruction[0] == syscalls.JUMP_ANY_BIT]
    for name in (*syscalls.DENIED, *syscalls.UNKNOWN, "socket", "ioctl"):
        number = syscalls.ARCHITECTURES[machine][name]
        assert (syscalls.JUMP_EQUAL, number) in {(code, value) for code, _, _, value in build}
