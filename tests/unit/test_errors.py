"""Errors, as they come out of a worker's process."""

from __future__ import annotations

import pickle

import pytest

from imagefactory.errors import (
    BuildError,
    DownloadError,
    FactoryError,
    RecipeError,
    ToolError,
    UnsolvableError,
)


@pytest.mark.parametrize(
    "error",
    [
        BuildError("no space left", hint="free some"),
        DownloadError("half a file"),
        ToolError("there is no uv", hint="apt-get install uv"),
        RecipeError(["a.yaml:1:2: one", "a.yaml:3:4: two"], hint="mend both"),
        UnsolvableError("no solution", hint="ask for less", tree="a\n b"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_error_crosses_a_process_whole(error: FactoryError) -> None:
    """Its kind, which is the exit code, and all that it knows: kinds are made of different arguments."""
    came = pickle.loads(pickle.dumps(error))
    assert type(came) is type(error)
    assert (str(came), vars(came)) == (str(error), vars(error))
