"""An error that a test expects, by its class, code and values."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

import pytest

from imagefactory.errors import ImagefactoryError

E = TypeVar("E", bound=ImagefactoryError)


@contextmanager
def fails(
    kind: type[E], code: str, *values: str, match: str = "", hint: str = ""
) -> Iterator[pytest.ExceptionInfo[E]]:
    """Expect an error of that class with that code, all `values` in its message, and `hint` in its hint."""
    with pytest.raises(kind, match=match or None) as caught:
        yield caught
    assert caught.value.code == code
    for value in values:
        assert value in caught.value.message
    assert hint in caught.value.hint
