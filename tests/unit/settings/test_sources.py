"""Each setting has a class: what a project that nobody trusts may give, and what it may not."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path

import pytest

from imagefactory.errors import UsageError
from imagefactory.settings.files import CHECKED_ELSEWHERE, TABLES, UntrustedProjectError
from imagefactory.settings.load import load_settings
from imagefactory.settings.sources import MEANINGS, REASONS, find_restricted, key_ids, may_be_set
from tests.made.trusted import write_settings

ROOT = Path(__file__).parents[3]
FREE = {"codec", "container", "site"}
"""Nothing here names a program, a path, a server or a key, or loosens a check."""


def names() -> set[str]:
    loaded = load_settings(directory=Path("/"), start=Path("/"), environ={"HOME": "/nobody"})
    return {name for name, _ in loaded.rows()} - {"root"}


def value_of(name: str) -> str:
    if name in TABLES:
        return f"[{name}]\n{TABLES[name]}\n"
    rows = {"trust": "[[trust]]\n", "policy": "[policy]\n", "codec": 'codec = "gzip"\n'}
    rows["container"] = 'container = "pyxis"\n'
    return rows.get(name, f'{name} = "chtc"\n')


def test_every_setting_has_a_class_and_a_meaning() -> None:
    assert REASONS.keys() == names() | set(CHECKED_ELSEWHERE)
    assert MEANINGS.keys() == names()
    assert {name for name, reason in REASONS.items() if not reason} == FREE
    assert not may_be_set("a-setting-of-next-year", trusted=False)


@pytest.mark.parametrize("name", sorted(REASONS))
def test_only_a_trusted_project_gives_what_is_restricted(tmp_path: Path, name: str) -> None:
    environ = {"HOME": str(tmp_path / "home")}
    root = tmp_path / "clone"
    root.mkdir()
    (root / "imagefactory.toml").write_text(f"# a comment\n{value_of(name)}")

    if name in FREE:
        loaded = load_settings(directory=root, start=root, environ=environ)
        assert dict(loaded.rows())[name].origin == str(root / "imagefactory.toml")
        return
    with pytest.raises(UntrustedProjectError) as caught:
        load_settings(directory=root, start=root, environ=environ)
    (found,) = caught.value.settings
    assert (found.name, found.line) == (name, 2)
    assert caught.value.code == "project-not-trusted"
    assert f"{root}/imagefactory.toml:2" in caught.value.message
    assert f"imagefactory -C {root} config --trust" in caught.value.hint
    shown = load_settings(directory=root, start=root, environ=environ, strict=False)
    assert [one.name for one in shown.untrusted] == [name]
    assert root / "imagefactory.toml" not in shown.files
    if name not in CHECKED_ELSEWHERE:
        assert dict(shown.rows())[name].origin == "default"


@pytest.mark.parametrize("name", sorted({*names()} - FREE))
def test_the_environment_and_the_users_file_give_all(tmp_path: Path, name: str) -> None:
    """A value that cannot be used is named with its origin; a class never stops it."""
    folder = tmp_path / "home/.config/imagefactory"
    folder.mkdir(parents=True)
    (folder / "imagefactory.toml").write_text(value_of(name))
    environ = {"HOME": str(tmp_path / "home")}
    variable = f"IMAGEFACTORY_{name.upper().replace('-', '_')}"
    for given, origin in ((environ, str(folder)), ({**environ, variable: "chtc"}, f"${variable}")):
        assert origin in outcome(tmp_path, given, name)


def outcome(folder: Path, environ: Mapping[str, str], name: str) -> str:
    """Where the value came from, or the error of a value that cannot be used."""
    try:
        return dict(load_settings(directory=None, start=folder, environ=environ).rows())[name].origin
    except UntrustedProjectError:
        raise
    except UsageError as error:
        return error.message


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ('"store" = "x"\n', [("store", 1)]),
        ('\n  store="x"\n', [("store", 2)]),
        ('mirrors."docker.io" = "x"\n', [("mirrors", 1)]),
        ('mirrors = { "docker.io" = "x" }\n', [("mirrors", 1)]),
        ("trust = [{}]\n", [("trust", 1)]),
        ("[ policy ]\n", [("policy", 1)]),
        ('"st\\u006fre" = "x"\n', [("store", 0)]),
        ('site = "chtc"\nsolver = "./x"\ncache = "y"\n', [("solver", 2), ("cache", 3)]),
        ('unknown = 1\ncodec = "gzip"\n', []),
    ],
)
def test_what_is_restricted_is_found_however_it_is_written(text: str, found: list[tuple[str, int]]) -> None:
    rows = find_restricted(tomllib.loads(text), text)
    assert [(one.name, one.line) for one in rows] == found


def test_rows_of_keys_that_the_user_knows_are_no_reason_to_ask() -> None:
    text = '[[trust]]\nkeyid = "aa"\n[[trust]]\nkeyid = "bb"\n'
    document = tomllib.loads(text)
    assert find_restricted(document, text, ["aa", "bb"]) == ()
    assert [one.name for one in find_restricted(document, text, ["aa"])] == ["trust"]
    assert key_ids({"trust": "x"}) == key_ids({"trust": [{}]}) == ("",)
    assert find_restricted({"trust": "x"}, 'trust = "x"', ["aa"])


def test_the_repository_itself_needs_no_trust() -> None:
    """The README's first command works in a clone."""
    text = (ROOT / "imagefactory.toml").read_text()
    assert find_restricted(tomllib.loads(text), text) == ()


def test_a_trusted_project_gives_all(tmp_path: Path) -> None:
    environ = {"HOME": str(tmp_path / "home")}
    write_settings(tmp_path, 'store = "images"\nworkers = 3\n', environ)
    loaded = load_settings(directory=tmp_path, start=tmp_path, environ=environ)
    assert (loaded.store_path, loaded.worker_count) == (tmp_path / "images", 3)
    assert loaded.files[0] == tmp_path / "imagefactory.toml"
