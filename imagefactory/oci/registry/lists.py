"""What a list of a registry may cost: anyone who may push can make one long, and a registry without end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from imagefactory.http import RefusedError


class NoListError(Exception):
    """An answer that is not a list, such as a page for people."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ListLimits:
    """Of one list: its pages, rows (with annotations of those kept), bytes in all, and its seconds."""

    pages: int
    rows: int
    size: int
    seconds: float


# A page of tags has 1,000 rows, one of referrers up to 4 MiB. The largest repositories of CI have some
# 100,000 tags, and an image has some statements per GPU.
LIMITS = ListLimits(pages=1000, rows=250_000, size=64 << 20, seconds=600.0)
MOST_IN_TAG = 2000
"""The rows of a list in a tag `sha256-<hex>` that are looked for, one request each."""


class ListReading:
    """One list as it is read: counts, and raises RefusedError that names the limit it is beyond."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock, self._began = clock, clock()
        self._pages = self._rows = self._size = 0

    def count(self, *, pages: int = 0, rows: int = 0, size: int = 0) -> None:
        self._pages, self._rows, self._size = self._pages + pages, self._rows + rows, self._size + size
        if self._pages > LIMITS.pages:
            raise RefusedError(f"its list has more than {LIMITS.pages:,} pages")
        if self._rows > LIMITS.rows:
            raise RefusedError(f"its list has more than {LIMITS.rows:,} rows")
        if self._size > LIMITS.size:
            raise RefusedError(f"its list has more than {LIMITS.size:,} bytes")
        if self._clock() - self._began > LIMITS.seconds:
            raise RefusedError(f"its list took more than {LIMITS.seconds:.0f} seconds")
