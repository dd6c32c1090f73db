"""Which problems were found in a person's file, as tests name them: by place, code and values."""

from __future__ import annotations

from collections.abc import Iterable

from imagefactory.errors import Diagnostic


def reports(problems: Iterable[Diagnostic], expected: str) -> bool:
    """Return whether a problem fits `expected`: `[[FILE:]LINE:COLUMN] CODE VALUE...`.

    So does `9:10 unknown-key lab`. Each value must be in its message or fix.
    """
    first, *words = expected.split()
    place, (code, *values) = (first, words) if ":" in first else ("", (first, *words))
    return any(
        one.location.endswith(place if place.count(":") != 1 else f":{place}")
        and one.code == code
        and all(value in f"{one.message} {one.fix}" for value in values)
        for one in problems
    )
