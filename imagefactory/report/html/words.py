"""The words of a report's cells: one symbol, one meaning and one way of being drawn each. Pure.

Three ways of being drawn, so that nobody needs the colours: filled, something ran there; outlined, it is only
foretold; plain, nothing is known. Filled ones differ by symbol, and by colour for those who see it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from imagefactory.gpu.values import Answer, Basis, Claim
from imagefactory.matrix.combos import REPORTED, REVOKED, VERIFIED, Combo, ComboState
from imagefactory.model import Outcome

GOOD, BAD, OPEN, HOPE, NOPE, NONE = "good", "bad", "open", "hope", "nope", "none"
"""Verified; ran and said no; tried, which says nothing of it; foretold yes; foretold no; nothing known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Word:
    """`code` is its short name in pages, one for each word."""

    word: str
    code: str
    symbol: str
    kind: str
    says: str


PREDICTED, PARTLY, UNLIKELY = "predicted", "predicted-partly", "predicted-no"
DOCUMENTED, HALF_DOCUMENTED, UNDOCUMENTED = "documented", "documented-partly", "documented-no"

_ROWS = (
    (Outcome.VERIFIED, "v", "✓", GOOD, "the suite passed in that image, on that GPU and driver; signed"),
    (
        Outcome.TOGETHER,
        "tg",
        "⇉",
        OPEN,
        "the suite passed on several GPUs at once, which says nothing of one; signed",
    ),
    (Outcome.APART, "ap", "⇹", OPEN, "the suite failed on several GPUs at once, which says nothing of one"),
    (Outcome.WRONG_NUMBERS, "wn", "≠", BAD, "the suite ran there and computed wrongly"),
    (Outcome.NO_KERNEL, "nk", "∅", BAD, "the suite ran there and met no code for that GPU"),
    (Outcome.DRIVER_TOO_OLD, "do", "↓", BAD, "the suite ran there and the driver was too old"),
    (Outcome.LOAD_FAILED, "lf", "✗", BAD, "the suite ran there and something did not load"),
    (REVOKED, "rv", "↺", BAD, "it was verified there, and that was taken back; signed"),
    (Outcome.BUILD_FAILED, "bf", "⊥", BAD, "the image could not be built"),
    (Outcome.UNSOLVABLE, "us", "⊗", BAD, "no environment could be locked"),
    (Outcome.NO_GPU, "ng", "○", OPEN, "tried, and there was no GPU"),
    (Outcome.WRONG_GPU, "wg", "⇄", OPEN, "tried, and the GPU was another than asked for"),
    (Outcome.PULL_FAILED, "pf", "⇣", OPEN, "tried, and the image could not be fetched"),
    (Outcome.TIMEOUT, "to", "…", OPEN, "tried, and it took too long"),
    (Outcome.HELD, "he", "‖", OPEN, "tried, and the pool held the job"),
    (Outcome.NO_MATCH, "nm", "∄", OPEN, "tried, and no machine of the pool fits"),
    (Outcome.INFRASTRUCTURE, "in", "!", OPEN, "tried, and the machine was at fault"),
    (PREDICTED, "p", "◇", HOPE, "not tested; by its GPU code it runs there"),
    (PARTLY, "pp", "◈", HOPE, "not tested; by its GPU code some of it runs there"),
    (DOCUMENTED, "d", "□", HOPE, "not tested; a project's page says that it runs there"),
    (HALF_DOCUMENTED, "dp", "◪", HOPE, "not tested; a project's page says that some of it runs there"),
    (UNLIKELY, "pn", "⊘", NOPE, "not tested; by its GPU code it does not run there"),
    (UNDOCUMENTED, "dn", "⊖", NOPE, "not tested; a project's page speaks against it"),
    (Outcome.NOT_TESTED, "n", "·", NONE, "not tested, and nothing is known"),
)
WORDS = {
    str(word): Word(word=str(word), code=code, symbol=symbol, kind=kind, says=says)
    for word, code, symbol, kind, says in _ROWS
}
_FORETOLD = {
    (Basis.PREDICTED, Answer.YES): PREDICTED,
    (Basis.PREDICTED, Answer.PTX): PREDICTED,
    (Basis.PREDICTED, Answer.PARTLY): PARTLY,
    (Basis.PREDICTED, Answer.NO): UNLIKELY,
    (Basis.DOCUMENTED, Answer.YES): DOCUMENTED,
    (Basis.DOCUMENTED, Answer.PTX): DOCUMENTED,
    (Basis.DOCUMENTED, Answer.PARTLY): HALF_DOCUMENTED,
    (Basis.DOCUMENTED, Answer.NO): UNDOCUMENTED,
}


def foretold(claim: Claim | None) -> Word:
    """What a claim without a verdict says."""
    word = _FORETOLD.get((claim.basis, claim.answer)) if claim else None
    return WORDS[word or Outcome.NOT_TESTED]


def word_of(combo: Combo, claim: Claim | None) -> Word:
    """The word of a cell; `claim` is the weightiest without a verdict, for one that nobody ran."""
    if combo.state is ComboState.VALID:
        return WORDS[Outcome.VERIFIED]
    if combo.basis in (VERIFIED, REPORTED) or combo.cause in (Outcome.UNSOLVABLE, Outcome.NO_MATCH):
        return WORDS[str(combo.cause)]
    if combo.state is ComboState.RULED_OUT:
        return WORDS[UNDOCUMENTED if combo.basis == Basis.DOCUMENTED else UNLIKELY]
    return foretold(claim)


def count_words(words: Iterable[Word]) -> tuple[tuple[Word, int], ...]:
    """Every word with how often it stands there, in the order of the table."""
    found = Counter(word.word for word in words)
    return tuple((word, found[name]) for name, word in WORDS.items())


def _codes() -> list[tuple[str, list[str]]]:
    kinds = (GOOD, BAD, OPEN, HOPE, NOPE, NONE)
    return [(kind, [word.code for word in WORDS.values() if word.kind == kind]) for kind in kinds]


STYLED: Mapping[str, object] = {"words": tuple(WORDS.values()), "kinds": _codes()}
"""What the style of pages is made with."""
