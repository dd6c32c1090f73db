"""A .sif's container around another partition: what stays of apptainer's, and what tells no time now."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from imagefactory.oci.sif import MAGIC, around, for_processor, read_partition

PARTITION, LABELS = 0x4004, 0x4006
FIRST = 4096 + 48 * 585
ROW = "<i?III7q128s384s"


def made(*parts: tuple[int, bytes, bytes], moment: int = 1234) -> bytes:
    """A .sif with these parts (kind, name, content) one after the other, as apptainer writes it."""
    rows, contents, at = b"", b"", FIRST
    for number, (kind, name, content) in enumerate(parts, 1):
        padding = -at % 4096 if kind == PARTITION else 0
        extra = struct.pack("<ii3s", 1, 2, b"02\0") if kind == PARTITION else b""
        place = (at + padding, len(content), padding + len(content), moment, moment, 501, 20)
        rows += struct.pack(ROW, kind, True, number, 1 << 31, 0, *place, name, extra)
        contents += bytes(padding) + content
        at += padding + len(content)
    head = b"#!/usr/bin/env run-singularity\n\0" + MAGIC + b"01\x0002\0" + bytes(range(16))
    free = 48 - len(parts)
    head += struct.pack("<8q", moment, moment, free, 48, 4096, 48 * 585, FIRST, len(contents))
    return head.ljust(4096, b"\0") + rows.ljust(48 * 585, b"\0") + contents


def test_another_partition_and_other_texts(tmp_path: Path) -> None:
    theirs = made((LABELS, b"a.json", b"built today"), (LABELS, b"b", b"kept"), (PARTITION, b"", b"theirs"))
    size = 3 << 20
    head = around(theirs, lambda text: text.replace(b"today", b"at a moment"), size, 77)
    wanted = made(
        (LABELS, b"a.json", b"built at a moment"), (LABELS, b"b", b"kept"), (PARTITION, b"", bytes(size))
    )
    offset = len(head)
    assert offset % 4096 == 0
    assert head[4096:] == wanted[4096:offset].replace(
        struct.pack("<4q", 1234, 1234, 501, 20), struct.pack("<4q", 77, 77, 0, 0)
    )
    assert head[:48] == wanted[:48]
    assert head[48:64] == bytes(16)
    assert head[64:80] == struct.pack("<2q", 77, 77)
    assert head[80:4096] == wanted[80:4096]
    path = tmp_path / "a.sif"
    path.write_bytes(head + bytes(size))
    found = read_partition(path)
    assert (found.offset, found.size) == (offset, size)


def test_the_processor_stands_in_the_head_and_with_the_system(tmp_path: Path) -> None:
    theirs = made((LABELS, b"a.json", b"kept 02"), (PARTITION, b"", b"theirs"))
    head = around(theirs, bytes, 4096, 77)
    assert for_processor(head, "amd64") == head
    assert for_processor(head, "riscv64") == head
    arm = for_processor(head, "arm64")
    changed = [at for at, (one, other) in enumerate(zip(head, arm, strict=True)) if one != other]
    assert [(head[at : at + 1], arm[at : at + 1]) for at in changed] == [(b"2", b"4")] * 2
    assert changed[0] == 46
    path = tmp_path / "a.sif"
    path.write_bytes(arm + bytes(4096))
    assert read_partition(path).offset == len(head)


@pytest.mark.parametrize("parts", [(), ((LABELS, b"", b"x"),), ((PARTITION, b"", b"x"), (LABELS, b"", b"x"))])
def test_another_layout_is_refused(parts: tuple[tuple[int, bytes, bytes], ...]) -> None:
    with pytest.raises(ValueError, match="not its last part"):
        around(made(*parts), bytes, 4096, 0)
