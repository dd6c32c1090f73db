"""What counts as a release of a conda package."""

from __future__ import annotations

from datetime import UTC, date, datetime
from types import SimpleNamespace
from typing import Any

from imagefactory.lock.conda.explain import releases


def record(version: str, day: str) -> Any:
    """As much of a channel's record as is asked."""
    moment = datetime.fromisoformat(day).replace(tzinfo=UTC) if day else None
    return SimpleNamespace(version=version, timestamp=moment)


def test_a_release_begins_with_its_first_build() -> None:
    found = releases(
        [record("1.10", "2024-03-01"), record("1.9", "2023-01-02"), record("1.10", "2024-02-01")]
    )
    assert [(str(one.version), one.uploaded) for one in found] == [
        ("1.9", date(2023, 1, 2)),
        ("1.10", date(2024, 2, 1)),
    ]


def test_no_release_is_what_only_conda_can_read_or_nobody_should_have() -> None:
    some = [record("2.0rc1", "2024-01-01"), record("2024a_1", "2024-01-01"), record("1.0", "")]
    assert [(str(one.version), one.uploaded) for one in releases(some)] == [("1.0", None)]
