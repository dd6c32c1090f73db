"""ELF files that are not what their headers say."""

from __future__ import annotations

import struct

from imagefactory.scan.fatbin import skippable

WORTH = 1 << 17


def elf(sections: int, told: int) -> bytes:
    """A file with a range of machine code and a table of so many sections, of which it tells `told`."""
    table = 64 + WORTH
    head = b"\x7fELF\x02\x01".ljust(40, b"\0") + struct.pack("<Q", table)
    head = head.ljust(58, b"\0") + struct.pack("<HHH", 64, told, 0)
    code = struct.pack("<IIQQQQ", 0, 1, 4, 0, 64, WORTH).ljust(64, b"\0")
    return head + bytes(WORTH) + code * sections


def skipped(data: bytes, size: int) -> tuple[tuple[int, int], ...]:
    return skippable(lambda offset, count: data[offset : offset + count], size)


def test_machine_code_is_passed_over() -> None:
    data = elf(sections=1, told=1)
    assert skipped(data, len(data)) == ((64, 64 + WORTH),)


def test_a_table_that_goes_beyond_the_file_tells_nothing() -> None:
    data = elf(sections=1, told=2)
    assert skipped(data, len(data)) == ()
    # It was longer when its size was asked, and is cut where an entry ends or within one.
    assert skipped(data, len(data) + 64) == ()
    assert skipped(data[:-10], len(data) + 64) == ()
