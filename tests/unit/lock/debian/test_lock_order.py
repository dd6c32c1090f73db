"""Debian's order of versions: each of these is older than the next, as `dpkg --compare-versions` has it."""

from __future__ import annotations

from itertools import pairwise

import pytest

from imagefactory.lock.debian.lock import debian_key

ROWS = (
    ("1.0~~", "1.0~~a", "1.0~", "1.0", "1.0-1~bpo12+1", "1.0-1", "1.0-1+b1", "1.0-1+u2", "1.0-1+u10"),
    ("0~.+0", "00-0", "0.9", "1.2a", "1.2b", "1.2+x", "1.2.1", "1.10", "10", "1:0.1", "2:0"),
    ("1.0a-1", "1.0z", "1.0-a-1", "1.0-b-1"),
)  # fmt: skip


@pytest.mark.parametrize("row", ROWS)
def test_each_is_older_than_the_next(row: tuple[str, ...]) -> None:
    for older, newer in pairwise(map(debian_key, row)):
        assert older < newer


def test_what_is_written_in_two_ways_is_one_version() -> None:
    for one, other in (("1.0", "0:1.00"), ("1.0", "1.0-0"), ("1.", "1.0"), ("1-01", "1-1")):
        assert debian_key(one) == debian_key(other)
    with pytest.raises(ValueError, match="invalid literal"):
        debian_key("a:1")
