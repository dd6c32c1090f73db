"""Errors that a test expects, by their code. A code belongs to one class, so it implies the exit code."""

from __future__ import annotations

import pytest

from imagefactory.errors import ImagefactoryError


def fails(code: str, match: str | None = None) -> pytest.RaisesExc[ImagefactoryError]:
    """Expect an error with this code (and message) in a `with` block; `as caught` gives message and hint."""
    return pytest.raises(ImagefactoryError, match=match, check=lambda error: error.code == code)
