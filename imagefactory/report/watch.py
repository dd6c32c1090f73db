"""What is new, as a person reads it, as JSON, as a commit message and as a workflow takes it. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence

from imagefactory.serialize import fields_of
from imagefactory.lock.moves import Move
from imagefactory.views.text import wrap
from imagefactory.stages.watch import NewCuda, NewRelease, News

_SHOWN = 12
"""Packages of one lock that the text names; JSON and messages name all."""
_COLUMN = 9
WIDTH = 72
"""Of a commit message."""


def format_news(news: News, width: int | None = None) -> str:
    """The unit's name, and a line or more for each thing that is new."""
    nothing = "nothing new in what could be solved" if news.faults else "nothing new"
    lines = [news.unit.name if news else f"{news.unit.name}: {nothing}"]
    for kind, first, more in _rows(news):
        room = (width or 110) - 2 - _COLUMN
        head, *rest = wrap(first, room)
        lines.append(f"  {kind.ljust(_COLUMN)}{head}")
        lines += [" " * (2 + _COLUMN) + line for line in rest]
        for text in more:
            lines += [" " * (4 + _COLUMN) + line for line in wrap(text, room - 2)]
    return "\n".join(lines)


def _rows(news: News) -> Iterable[tuple[str, str, Sequence[str]]]:
    """(kind, what is so, lines below it)."""
    for release in news.releases:
        yield "release", _release(news, release.found.series), [_to_have(news, release.command)]
    for one in news.cudas:
        yield "cuda", _cuda(news, one), [_to_have(news, one.command)]
    if news.python:
        yield "python", _python(news), []
    for moves, names in _grouped(news).items():
        more = [f"and {len(moves) - _SHOWN} more"] if len(moves) > _SHOWN else []
        kind, what = (
            ("base", _count(moves)) if news.unit.base else ("lock", f"{_count(moves)} in {_locks(names)}")
        )
        yield kind, what, [*map(str, moves[:_SHOWN]), *more]
    for verdict in news.expiring:
        text = f"{verdict.target} on {verdict.capability} holds until {verdict.day} only"
        yield "verdict", text, [f"to prove it again: imagefactory verify {verdict.target}"]


def _grouped(news: News) -> dict[tuple[Move, ...], list[str]]:
    """The locks in which the same moves happen, by these."""
    groups: dict[tuple[Move, ...], list[str]] = {}
    for one in news.locks:
        groups.setdefault(one.moves, []).append(one.name)
    return groups


def _list(names: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))


def _locks(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{len(names)} locks ({', '.join(names)})"


def _count(moves: Sequence[Move]) -> str:
    if not moves:
        return "the same packages, written anew"
    return f"{len(moves)} package{'s move' if len(moves) > 1 else ' moves'}"


def _release(news: News, series: str) -> str:
    one = next(release.found for release in news.releases if release.found.series == series)
    framework = news.unit.targets[0].framework
    newest = f", now {one.release}" if one.release != one.series else ""
    since = f", since {one.begun}" if one.begun else ""
    return f"{framework} {one.series}{since}{newest}, for Python {' and '.join(one.pythons)}"


def _to_have(news: News, command: str) -> str:
    return f"to have it: {command or f'a row in recipes/{news.unit.name}.yaml'}"


def _cuda(news: News, one: NewCuda) -> str:
    framework = news.unit.targets[0].framework
    return f"{framework} {one.series} has builds for CUDA {one.cuda}, which no row has"


def _python(news: News) -> str:
    found = news.python
    if found is None:
        return ""
    framework, source = news.unit.targets[0].framework, news.unit.targets[0].source
    what = "wheels" if source == "pypi" else "builds"
    told = f"{framework} {found.release} has {what} for Python {found.python}, which no row uses"
    if source != "pypi":  # Python is one of the packages
        return told
    return f"{told}; {f'{found.base} carries it' if found.base else 'no base carries it yet'}"


def commit_message(news: News, rows: Sequence[NewRelease] = (), notes: Sequence[str] = ()) -> str:
    """Subject, empty line, why; empty where no lock changes and no release got one of the `rows`.

    `notes` are what a person must check in those rows.
    """
    added = [_release(news, one.found.series) for one in rows]
    if not news.locks and not added:
        return ""
    name = f"the base {news.unit.base.name}" if news.unit.base else news.unit.name
    subject = f"Add {_list([one.found.series for one in rows])} to {name}" if added else ""
    locked = f"Lock {name} anew: {_what(news)}" if news.locks else ""
    if added and locked:
        subject, locked = f"{subject}, and lock it anew", ""
    lines = [subject or locked]
    if added:
        lines += ["", *wrap("A row, its locks and definitions for each series released since:", WIDTH)]
        lines += [f"  {one}" for one in added]
        lines += [line for note in notes for line in ("", *wrap(note, WIDTH))]
    if news.locks:
        lines += ["", *_relocked(news)]
    missing = [(_release(news, one.found.series), one.command) for one in news.releases if one not in rows]
    missing += [(_cuda(news, one), one.command) for one in news.cudas]
    if missing:
        lines += ["", "Not in here, each a row of its own:"]
        for what, command in missing:
            lines += [f"  {what}", *([f"    {command}"] if command else [])]
    return "\n".join(lines)


def _relocked(news: News) -> Iterable[str]:
    if news.unit.base:
        why = "The archive's packages moved on, which is how Debian's security updates come in."
    else:
        why = "A re-solve within the recipe's bounds gives other packages."
    yield from wrap(why, WIDTH)
    for moves, names in _grouped(news).items():
        yield from ("", *wrap(f"{', '.join(names)}:", WIDTH), *(f"  {move}" for move in moves))
        yield from () if moves else ("  the same packages, written anew",)


def _what(news: News) -> str:
    """Whose move the subject names: the one package's, else how many."""
    names = sorted({move.name for one in news.locks for move in one.moves})
    if not names:
        return "the same packages"
    return names[0] if len(names) == 1 else f"{len(names)} packages move"


def news_json(news: News) -> dict[str, object]:
    return {
        "name": news.unit.name,
        "releases": [
            {
                "series": one.found.series,
                "release": one.found.release,
                "since": str(one.found.begun or ""),
                "pythons": one.found.pythons,
                "command": one.command,
            }
            for one in news.releases
        ],
        "cudas": news.cudas,
        "python": news.python,
        "locks": [{"name": one.name, "moves": [fields_of(move) for move in one.moves]} for one in news.locks],
        "expiring": [
            {"target": one.target, "capability": one.capability, "until": str(one.day)}
            for one in news.expiring
        ],
        "message": commit_message(news),
    }


def github_lines(every: Iterable[News]) -> str:
    """`families={"include":[...]}`: a job for each unit in which a lock or a row changes, with its branch."""
    jobs = [
        {"family": news.unit.name, "branch": f"relock/{news.unit.name.replace(':', '-')}"}
        for news in every
        if news.locks or any(one.command for one in news.releases)
    ]
    return "families=" + json.dumps({"include": jobs}, separators=(",", ":"))
