"""A header that would fill the memory is refused before it is read."""

from __future__ import annotations

import io
import tarfile
import tracemalloc

import pytest

from imagefactory.oci.tar_stream import HEADER_LIMIT, CappedInfo

KINDS = [tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK]


class Zeros(io.RawIOBase):
    """A header, and then zeros for as long as somebody reads."""

    def __init__(self, header: bytes) -> None:
        self.header = header

    def read(self, size: int = -1) -> bytes:
        data, self.header = self.header[:size], self.header[size:]
        return data + bytes(size - len(data))


@pytest.mark.parametrize("kind", KINDS)
def test_a_header_of_gigabytes_is_not_read(kind: bytes) -> None:
    info = tarfile.TarInfo("x")
    info.type, info.size = kind, 64 * HEADER_LIMIT
    tracemalloc.start()
    try:
        with (
            pytest.raises(tarfile.ReadError, match="a header of"),
            tarfile.open(fileobj=Zeros(info.tobuf()), mode="r|", tarinfo=CappedInfo),
        ):
            pass
        assert tracemalloc.get_traced_memory()[1] < 4 * HEADER_LIMIT
    finally:
        tracemalloc.stop()


def test_a_long_name_is_still_read() -> None:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w", format=tarfile.GNU_FORMAT) as archive:
        archive.addfile(tarfile.TarInfo("a/" * 200 + "b"))
    packed.seek(0)
    with tarfile.open(fileobj=packed, mode="r|", tarinfo=CappedInfo) as archive:
        assert archive.getnames() == ["a/" * 200 + "b"]
