"""The command line in this process, and what it said."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from imagefactory import cli
from imagefactory.cli import output, sweeps
from imagefactory.errors import ImagefactoryError


@dataclass(frozen=True)
class Said:
    code: int
    out: str
    err: str
    error_codes: tuple[str, ...] = ()  # of the errors that were printed, in order

    def __iter__(self) -> Iterator[Any]:  # code, out, err = say(...)
        return iter((self.code, self.out, self.err))

    def __getitem__(self, index: int) -> Any:
        return tuple(self)[index]

    def json(self) -> dict[str, object]:
        value = json.loads(self.out)
        assert isinstance(value, dict)
        return value


Call = Callable[..., Said]


def say(capsys: pytest.CaptureFixture[str], *arguments: str) -> Said:
    codes: list[str] = []
    complain = output.print_errors

    def record(error: ImagefactoryError, prefix: str = "") -> None:
        codes.append(error.code)
        complain(error, prefix)

    with pytest.MonkeyPatch.context() as patch:
        for module in (cli, output, sweeps):
            patch.setattr(module, "print_errors", record)
        with pytest.raises(SystemExit) as ended:
            cli.main(arguments)
    said = capsys.readouterr()
    assert isinstance(ended.value.code, int)
    return Said(ended.value.code, said.out, said.err, tuple(codes))


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
