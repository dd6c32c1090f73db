"""Settings know where they came from, and a wrong file is said by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from imagefactory.errors import UsageError
from imagefactory.settings import load_settings

ENVIRON = {"HOME": "/home/someone"}


def test_defaults_follow_the_xdg_folders(tmp_path: Path) -> None:
    settings = load_settings(directory=None, start=tmp_path, environ=ENVIRON)
    assert settings.store.value == "/home/someone/.local/share/imagefactory/store"
    assert settings.cache.value == "/home/someone/.cache/imagefactory"
    moved = load_settings(directory=None, start=tmp_path, environ={**ENVIRON, "XDG_CACHE_HOME": "/c"})
    assert moved.cache_path == Path("/c/imagefactory")
    assert settings.worker_count >= 1


def test_the_nearest_file_upwards_is_the_root(tmp_path: Path) -> None:
    (tmp_path / "imagefactory.toml").write_text('store = "images"\nworkers = 3\n')
    below = tmp_path / "a" / "b"
    below.mkdir(parents=True)
    settings = load_settings(directory=None, start=below, environ=ENVIRON)
    assert settings.root_path == tmp_path
    assert settings.store_path == tmp_path / "images"
    assert settings.store.origin == str(tmp_path / "imagefactory.toml")
    assert settings.worker_count == 3


def test_the_environment_beats_the_file(tmp_path: Path) -> None:
    (tmp_path / "imagefactory.toml").write_text('codec = "gzip"\n')
    environ = {**ENVIRON, "IMAGEFACTORY_CODEC": "zstd", "IMAGEFACTORY_STORE": ""}
    settings = load_settings(directory=tmp_path, start=Path("/"), environ=environ)
    assert settings.codec.value == "zstd"
    assert settings.codec.origin == "$IMAGEFACTORY_CODEC"
    assert settings.store.origin == "default"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("stroe = 'x'", "unknown setting 'stroe'"),
        ("store = ", "cannot be read as TOML"),
        ("store = ['x']", "'store' must be a string"),
        ("workers = true", "'workers' must be a string"),
        ("workers = -1", "workers '-1'"),
        ("workers = '٣'", "is not a count"),
        ("codec = 'lzma'", "codec 'lzma'"),
        ("root = '/'", "unknown setting 'root'"),
    ],
)
def test_a_wrong_file_is_refused_by_name(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "imagefactory.toml").write_text(text, encoding="utf-8")
    with pytest.raises(UsageError) as caught:
        load_settings(directory=tmp_path, start=tmp_path, environ=ENVIRON)
    assert message in caught.value.message
    assert "imagefactory.toml" in caught.value.message


def test_a_misspelt_variable_is_refused_and_not_ignored(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="IMAGEFACTORY_STOER"):
        load_settings(directory=tmp_path, start=tmp_path, environ={**ENVIRON, "IMAGEFACTORY_STOER": "/x"})
