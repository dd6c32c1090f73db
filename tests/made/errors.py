"""An error that a test expects, by its class and code."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

import pytest

from imagefactory.errors import ImagefactoryError

E = TypeVar("E", bound=ImagefactoryError)


@contextmanager
def fails(kind: type[E], code: str, match: str = "") -> Iterator[pytest.ExceptionInfo[E]]:
    """Expect an error of that class with that code, and a message that `match` is found in."""
    with pytest.raises(kind, match=match or None) as caught:
        yield caught
    assert caught.value.code == code
