"""Select targets by words, and suggest names if no target matches. For recipes and catalogs. No I/O.

    pytorch-2.3-cu121       the name
    pytorch                 a family: all of it
    pytorch-2.*             a pattern
    pytorch-2.3             the prefix of only one name

A prefix ends at a complete number: `pytorch-2.1` is not `pytorch-2.10-cu128`. If one of the matching names
is a prefix of all others, it is selected, because a family's defaults have no suffix.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase

from imagefactory.errors import NothingSelectedError, UsageError
from imagefactory.recipes.yaml_tree import show
from imagefactory.versions import natural, nearest

KnownNames = Mapping[str, str]
"""Targets' names, each with its family."""
FEW = 12
_WILDCARD = re.compile(r"[*?\[]")
_HEAD = re.compile(r"(.*?)((?:-[0-9].*)?)", re.DOTALL)


def choose_names(words: Sequence[str], known: KnownNames, lacking: str = "no target") -> tuple[str, ...]:
    """Return the names that these words select, in the order of `known`; all without words.

    Raises NothingSelectedError, whose message begins with `lacking`, for a word without a match. Raises
    UsageError for a prefix of several names.
    """
    chosen: set[str] = set()
    for word in words:
        chosen |= set(_fitting(word, known) or (_prefixed(word, known, lacking),))
    return tuple(name for name in known if not words or name in chosen)


def choose_name(word: str, known: KnownNames, lacking: str = "no target") -> str:
    """Return the one name that `word` selects, as `choose_names`. Raises UsageError for several."""
    names = choose_names((word,), known, lacking)
    if len(names) > 1:
        raise UsageError(
            "target-ambiguous",
            f"{show(word)} matches {len(names)} targets, expected one",
            hint=f"choose one of {few(names)}",
        )
    return names[0]


def families_of(words: Sequence[str], known: KnownNames, invalid: Iterable[str]) -> frozenset[str]:
    """Return the families of `invalid` that may have a name that `words` select; their names are unknown."""
    families = {*known.values(), *invalid}
    result: set[str] = set()
    for word in words:
        head = _WILDCARD.split(word)[0]
        owners = [family for family in families if head == family or head.startswith(f"{family}-")]
        if head != word:
            result |= {family for family in families if family.startswith(head)}
        if owners and word not in known:
            result.add(max(owners, key=len))
    return frozenset(result) & frozenset(invalid)


def suggest(word: str, known: KnownNames) -> str:
    """Return a suggestion: a likely name or the existing versions, never another version; empty for none."""
    suggestion = nearest(word, known)
    if suggestion:
        return f"did you mean '{suggestion}'?"
    parts = _HEAD.fullmatch(word)
    head, rest = (parts[1], parts[2]) if parts else (word, "")
    families = sorted(set(known.values()))
    family = head if head in families else nearest(head, families)
    if not family:
        return f"choose from {few(families if len(families) > 1 else tuple(known))}" if known else ""
    meant = _common_prefix(f"{family}{rest}", known) if rest else ()
    if len(meant) == 1:
        return f"did you mean '{meant[0]}'?"
    release = "-".join([family, *rest.split("-")[1:2]])
    same = [name for name in known if name.startswith(f"{release}-")] if rest else []
    if same:
        return f"of {release} there is {few(same)}"
    has = f"{family} has {few([name for name, of in known.items() if of == family])}"
    return has if head == family else f"did you mean '{family}'? {has}"


def few(names: Sequence[str]) -> str:
    """Return some of the names, the newest if there are many."""
    if len(names) <= FEW:
        return ", ".join(names)
    newest = sorted(names, key=natural, reverse=True)[:FEW]
    return f"{', '.join(newest)} and {len(names) - FEW} more"


def _fitting(word: str, known: KnownNames) -> tuple[str, ...]:
    """Return the name itself, the matches of a pattern, or all of a family."""
    if word in known:
        return (word,)
    return tuple(name for name, family in known.items() if family == word or fnmatchcase(name, word))


def _prefixed(word: str, known: KnownNames, lacking: str) -> str:
    names = _common_prefix(word, known)
    if not names:
        raise NothingSelectedError("target-unknown", f"{lacking} {show(word)}", hint=suggest(word, known))
    if len(names) > 1:
        raise UsageError(
            "target-ambiguous",
            f"{show(word)} matches {len(names)} targets",
            hint=f"choose one of {few(names)}, or all with '{word}*' (in quotes)",
        )
    return names[0]


def _common_prefix(word: str, known: KnownNames) -> tuple[str, ...]:
    """Return the names that begin with the word, at the end of a number."""
    if not word:
        return ()
    whole = [name for name in known if name.startswith(f"{word}-")]
    names = whole or [
        name
        for name in known
        if name.startswith(word) and not (word[-1].isdigit() and name[len(word)].isdigit())
    ]
    shortest = min(names, key=len, default="")
    if names and all(name == shortest or name.startswith(f"{shortest}-") for name in names):
        return (shortest,)
    return tuple(names)
