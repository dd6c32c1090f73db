"""Errors, as they come out of a worker's process."""

from __future__ import annotations

import importlib.util
import pickle
import shlex
import sys
import tomllib
from pathlib import Path

import pytest

from imagefactory.errors import (
    DISTRIBUTION,
    BuildError,
    Diagnostic,
    DownloadError,
    ImagefactoryError,
    RecipeError,
    ToolError,
    UnbuiltError,
    UnsolvableError,
    extra_hint,
)


@pytest.mark.parametrize(
    "error",
    [
        BuildError("disk-full", "no space left", hint="free some"),
        DownloadError("hash-mismatch", "half a file"),
        ToolError("tool-missing", "there is no uv", hint="apt-get install uv"),
        RecipeError(
            [
                Diagnostic("unknown-key", "a.yaml:1:2", "one"),
                Diagnostic("not-text", "a.yaml:3:4", "two", "write it"),
            ],
            hint="fix both",
        ),
        UnsolvableError("lock-unsolvable", "no solution", hint="ask for less", tree="a\n b"),
        UnbuiltError("wheel-missing", "no wheel", packages=({"name": "filterpy"},), pins=("numpy==1.26.4",)),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_error_crosses_a_process_whole(error: ImagefactoryError) -> None:
    """Its kind, which is the exit code, and all that it knows: kinds are made of different arguments."""
    came = pickle.loads(pickle.dumps(error))
    assert type(came) is type(error)
    assert (str(came), vars(came)) == (str(error), vars(error))


def test_a_hint_installs_an_extra_of_this_distribution_for_this_very_python(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Other Pythons have no use for it, and the index's `imagefactory` is another program."""
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert project["name"] == DISTRIBUTION
    monkeypatch.setattr(sys, "executable", "/my tools/bin/python3")
    words = shlex.split(extra_hint("conda"))
    assert words == ["/my tools/bin/python3", "-m", "pip", "install", "gpu-imagefactory[conda]"]
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    words = shlex.split(extra_hint("conda"))
    assert words == ["uv", "pip", "install", "--python", "/my tools/bin/python3", "gpu-imagefactory[conda]"]
