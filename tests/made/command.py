"""The command line in this process, and what it said."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

from imagefactory import cli


class Said(NamedTuple):
    code: int
    out: str
    err: str

    def json(self) -> dict[str, object]:
        value = json.loads(self.out)
        assert isinstance(value, dict)
        return value


Call = Callable[..., Said]


def say(capsys: pytest.CaptureFixture[str], *arguments: str) -> Said:
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    said = capsys.readouterr()
    assert isinstance(ended.value.code, int)
    return Said(ended.value.code, said.out, said.err)


def json_of(said: Said, kind: str) -> Any:
    value = said.json()
    assert value["format"] == f"imagefactory.{kind}/1"
    return value


def run(*argv: str) -> int:
    try:
        cli.main(argv)
    except SystemExit as ended:
        return int(ended.code or 0)
    raise AssertionError("main() ends by sys.exit")
