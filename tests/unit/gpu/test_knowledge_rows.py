"""The tables of gpu/knowledge: every row names its source."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from imagefactory.gpu import knowledge

SOURCE = re.compile(r"(measured 20\d\d-\d\d|documented): .{20,}|reported: [\w.-]+/[\w.-]+ #\d+")
FOLDER = Path(knowledge.__file__).parent


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.toml")), ids=lambda path: path.name)
def test_every_row_has_a_source(path: Path) -> None:
    tables = tomllib.loads(path.read_text(encoding="utf-8"))
    rows = [row for table in tables.values() if isinstance(table, list) for row in table]
    assert rows
    for row in rows:
        assert re.match(
            r"(measured 20\d\d-\d\d|documented): .{20,}|reported: [\w.-]+/[\w.-]+ #\d+", row["source"]
        ), row


def test_drivers_go_up_with_cuda() -> None:
    drivers = knowledge.cuda_drivers()

    def numbers(text: str) -> tuple[int, ...]:
        return tuple(map(int, text.split(".")))

    known = sorted(drivers, key=numbers)
    assert [numbers(drivers[cuda]) for cuda in known] == sorted(numbers(drivers[cuda]) for cuda in known)
    assert drivers["12.1"] == "530.30.02"
