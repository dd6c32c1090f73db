"""A password in an address is never printed, whichever command or setting the address is given to."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from imagefactory import cli
from imagefactory.http import RetryPolicy
from imagefactory.settings.load import DIRECTORY_SETTINGS, ENVIRONMENT_PREFIX, Settings
from tests.made.command import say

ROOT = Path(__file__).parents[3]
SECRET = "hunter2-of-ann"
ADDRESSES = (
    f"https://ann:{SECRET}@nowhere.invalid/gpu:1",
    f"ann:{SECRET}@nowhere.invalid/gpu",
    f"ann:{SECRET}@nowhere.invalid:99999",
    f"nowhere.invalid/gpu=https://ann:{SECRET}@nowhere.invalid",
)
SAID = (
    (("report",), "output"),
    (("site", "nightly"), "install"),
    (("plan",), "keep"),
)
"""The options whose commands write what is named: they say so, or others of the test find it there."""


def commands(group: click.Group, *before: str) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    for name, command in group.commands.items():
        if isinstance(command, click.Group):
            yield from commands(command, *before, name)
        else:
            yield (*before, name), command


def calls() -> Iterator[tuple[str, ...]]:
    """Every command with an address in each place that takes a text, the others as short as may be."""
    for words, command in commands(cli.cli):
        arguments = [one for one in command.params if isinstance(one, click.Argument) and one.required]
        filled = ["jax-0.4.30-cu12" for _ in arguments]
        for address in ADDRESSES:
            if arguments or any(isinstance(one, click.Argument) for one in command.params):
                yield (*words, *[address for _ in arguments or (0,)])
            for option in command.params:
                made = (words, option.name) in SAID
                if isinstance(option, click.Option) and not option.is_flag and not made:
                    yield (*words, *filled, option.opts[0], address)


@pytest.fixture
def quiet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A factory of one recipe, which no setting of this machine and no server reach. Retries do not wait."""
    monkeypatch.setattr(RetryPolicy, "wait", lambda *_: 0.0)
    monkeypatch.setenv(f"{ENVIRONMENT_PREFIX}DEBIAN_MIRROR", "http://127.0.0.1:1/debian")
    monkeypatch.setenv(f"{ENVIRONMENT_PREFIX}INDEX", "http://127.0.0.1:1/simple")
    (tmp_path / "recipes").mkdir()
    for name in ("bases.yaml", "jax.yaml"):
        shutil.copy(ROOT / "recipes" / name, tmp_path / "recipes")
    (tmp_path / "imagefactory.toml").touch()
    monkeypatch.chdir(tmp_path)
    for name in ("HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME", "XDG_CACHE_HOME", "XDG_CONFIG_DIRS"):
        monkeypatch.setenv(name, str(tmp_path / "home"))


def test_what_is_given_to_a_command(quiet: None, capsys: pytest.CaptureFixture[str]) -> None:
    told = [(call, said) for call in calls() if SECRET in str(said := say(capsys, *call))]
    assert [call for call, _ in told] == []


@pytest.mark.parametrize("name", sorted(Settings.__dataclass_fields__))
def test_what_a_setting_holds(
    name: str, quiet: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for address in ADDRESSES[: 1 if name in DIRECTORY_SETTINGS else None]:  # a folder may have any name
        monkeypatch.setenv(ENVIRONMENT_PREFIX + name.upper(), address)
        for command in (("list",), ("config",), ("config", "--json"), ("image", "list", "--json")):
            assert SECRET not in str(say(capsys, *command)), (command, address)
