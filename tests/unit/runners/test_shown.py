"""Which mount points are in a folder, as the kernel lists them."""

from __future__ import annotations

import pytest

from imagefactory.runners.sandbox.shown import mounts_below

LINES = (
    b"27 1 254:0 / / rw,relatime - ext4 /dev/vda rw\n",
    b"30 27 0:20 / /data rw,relatime - nfs server:/data rw\n",
    b"31 30 0:21 / /data/a\\040b/in rw,relatime - tmpfs none rw\n",
    b"32 27 0:22 / /database rw,relatime shared:3 master:4 - tmpfs none rw\n",
    b"33 27 0:23 / /data/a\\040b/in rw,relatime - tmpfs none rw\n",
    b"34 27 0:24 /x /k\xff/m rw - ext4 /dev/vdb rw\n",
)


@pytest.mark.parametrize(
    ("folder", "points"),
    [
        ("/data", ["/data/a b/in"]),
        ("/data/a b", ["/data/a b/in"]),
        ("/data/a b/in", []),
        ("/data/a", []),
        ("/k\udcff", ["/k\udcff/m"]),
        ("/", ["/data", "/data/a b/in", "/database", "/k\udcff/m"]),
    ],
)
def test_mounts_below(folder: str, points: list[str]) -> None:
    assert mounts_below(folder, LINES) == points
