"""What a registry says, as it is shown."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from imagefactory.oci.registry.client import Registry

SESSION = Registry("box.example").session


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        ("x" * 300, "x" * 300),
        ("x" * 301, "x" * 300 + " ..."),
        ("one\ntwo\t\x1b[31mthree", "one two [31mthree"),
        ("GET https://ann:word@box.example/v2/a?sig=abc failed", "GET https://box.example/v2/a failed"),
        ("is it there?", "is it there?"),
    ],
)
def test_one_line_of_a_fair_length_without_credentials(said: str, shown: str) -> None:
    assert SESSION._clean(said) == shown


@given(st.text(max_size=400))
def test_whatever_is_said_is_one_printable_line(said: str) -> None:
    shown = SESSION._clean(said)
    assert shown.isprintable()
    assert len(shown) <= 304


def test_a_secret_within_a_secret_leaves_nothing_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SESSION._tokens, "secrets", {"word", "sword-fish"}, raising=False)
    assert SESSION._clean("sword-fish, word") == "***, ***"
