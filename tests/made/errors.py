"""Errors that a test expects, by their code. A code belongs to one class, so it implies the exit code."""

from __future__ import annotations

import pytest

from imagefactory.errors import ImagefactoryError


def fails(
    code: str, match: str | None = None, *, message: str | tuple[str, ...] = (), hint: str = ""
) -> pytest.RaisesExc[ImagefactoryError]:
    """Expect an error with this code in a `with` block, with these texts in its message and its hint."""
    texts = (message,) if isinstance(message, str) else message

    def check(error: ImagefactoryError) -> bool:
        return error.code == code and all(text in error.message for text in texts) and hint in error.hint

    return pytest.raises(ImagefactoryError, match=match, check=check)
