"""Sizes and times as people write them, and what an image needs of a machine."""

from __future__ import annotations

from datetime import timedelta

import pytest

from imagefactory.schedulers.pool import ImageKind
from imagefactory.schedulers.sizes import (
    GB,
    disk_of,
    format_size,
    image_disk,
    memory_of,
    parse_size,
    parse_time,
)
from tests.made.errors import fails


def test_disk_holds_the_image_in_its_form() -> None:
    assert image_disk(ImageKind.SIF, 4 * GB, 7 * GB) == 4 * GB
    assert image_disk(ImageKind.OSDF, 4 * GB, 7 * GB) == 4 * GB
    assert image_disk(ImageKind.ORAS, 4 * GB, 7 * GB) == 8 * GB
    assert image_disk(ImageKind.DOCKER, 3 * GB, 7 * GB) == 13 * GB
    assert image_disk(ImageKind.DOCKER, 3 * GB, 0) == 15 * GB  # its unpacked size is not known
    assert disk_of(ImageKind.SIF, 4 * GB + 1, 7 * GB) == 6 * GB


def test_memory_grows_with_the_image() -> None:
    assert memory_of(7 * GB) == 8 * GB
    assert memory_of(0, 2 * GB) == 7 * GB


@pytest.mark.parametrize(
    ("text", "size"), [("8GB", 8 * GB), ("1.5 G", 3 * GB // 2), ("512", GB // 2), ("1tb", 1024 * GB)]
)
def test_sizes_are_htcondors(text: str, size: int) -> None:
    assert parse_size(text) == size
    assert parse_size(format_size(size)) == size


@pytest.mark.parametrize("text", ["", "0GB", "8 gigs", "-1GB", "1e9", "8GB\nqueue", "99999999TB", "B"])
def test_text_that_is_not_a_size(text: str) -> None:
    with fails("size-invalid"):
        parse_size(text)


def test_times() -> None:
    assert parse_time("90m") == timedelta(minutes=90)
    assert parse_time("3d") == timedelta(days=3)
    for text in ("", "0h", "12", "1y", "999999w", "-1h"):
        with fails("duration-invalid"):
            parse_time(text)
