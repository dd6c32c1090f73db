"""The most important messages of commands and settings, word for word."""

from __future__ import annotations

from pathlib import Path

import pytest

from imagefactory import cli
from imagefactory.errors import ImagefactoryError
from imagefactory.settings.load import load_settings

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(
    ("words", "message", "hint"),
    [
        (
            "build --push --no-test pytorch-2.3-cu121",
            "--push requires the smoke test",
            "remove --no-test",
        ),
        (
            "lock --check --upgrade-package idna",
            "--check and --upgrade-package exclude each other",
            "remove one of them",
        ),
        (
            "lock base:debian-0",
            "there is no base 'debian-0'",
            "the bases are debian-12, debian-13, debian-12-arm64",
        ),
        (
            "image export --compression fast pytorch-2.3-cu121",
            "--compression requires --format sif or sqsh",
            "add --format sif or remove --compression",
        ),
        ("verify", "no image is given", "run imagefactory verify TARGET"),
        (
            "verify --nonce-dir x pytorch-2.3-cu121",
            "--nonce-dir requires --kit",
            "add --kit DIR or remove --nonce-dir",
        ),
        ("compat jax-0.10.2-cpu", "jax-0.10.2-cpu is for CPUs only", "remove jax-0.10.2-cpu"),
        (
            "recipe new pytorch",
            f"{ROOT}/recipes/pytorch.yaml already exists",
            "edit it, or choose another family",
        ),
        (
            "image prune --older-than x --registry r.example",
            "'x' is not an age",
            "write hours, days or weeks: 12h, 30d, 2w",
        ),
    ],
)
def test_commands(words: str, message: str, hint: str) -> None:
    with pytest.raises(ImagefactoryError) as caught:
        cli.cli.main(args=["-C", str(ROOT), *words.split()], standalone_mode=False)
    assert (caught.value.message, caught.value.hint) == (message, hint)


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ("codec = 'lzma'", "codec: 'lzma' ({file}) is not a codec", "write zstd, zstd-9 or gzip"),
        ("codec = []", "{file}: 'codec' is not a string", 'write codec = "..."'),
        (
            "\nsolver = 'mamba'",
            "{file}:2: 'solver' is allowed only in a project that you trust (a program to run)",
            "read the file; to trust it: imagefactory -C {root} config --trust",
        ),
    ],
)
def test_settings(tmp_path: Path, text: str, message: str, hint: str) -> None:
    file = tmp_path / "imagefactory.toml"
    file.write_text(text)
    with pytest.raises(ImagefactoryError) as caught:
        load_settings(directory=tmp_path, start=tmp_path, environ={"HOME": str(tmp_path / "home")})
    expected = (message.format(file=file), hint.format(root=tmp_path))
    assert (caught.value.message, caught.value.hint) == expected
