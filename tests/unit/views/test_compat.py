"""The words below a table of answers."""

from __future__ import annotations

from imagefactory.gpu.values import Compatibility
from imagefactory.views.compat import LEGEND, LETTERS


def test_every_letter_is_explained_and_stands_for_one_answer() -> None:
    explained = {entry.split()[0] for line in LEGEND[:2] for entry in line.split("   ")} - {"!"}
    assert sorted(LETTERS.values()) == sorted(explained)
    assert set(LETTERS) == set(Compatibility) - {Compatibility.CPU}
