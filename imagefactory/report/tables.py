"""Tables of proven combinations as files: CSV with the columns of CHTC's compatibility test, Markdown, JSON.

Pure. `valid_combos.csv` and `invalid_combos.csv` have one line for each framework, CUDA, version and
capability. A combination that was not tested, or whose job only met a fault of a machine or the pool, is in
neither. Their headers are those of that test, so that programs which read its files read these.
"""

from __future__ import annotations

import csv
import io
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import groupby

from imagefactory.serialize import format_time, plain
from imagefactory.gpu.capability import Capability
from imagefactory.matrix.combos import INVALID, REPORTED, VERIFIED, Combo, ComboState, unite
from imagefactory.matrix.ranges import Range
from imagefactory.model import Outcome
from imagefactory.views.text import fold, format_table
from imagefactory.extras.site.tables import FORMAT, JSON_FILE, MARKDOWN_FILE, Tables

HEADER = "Framework, Compute Capability, Cuda Library, Framework Version"
INVALID_HEADER = f"{HEADER}, Failure Cause"
RANGES_HEADER = "Framework, Compute Capability, First Version, Last Version, Cuda Libraries, State"

VALID_FILE, INVALID_FILE, RANGES_FILE = "valid_combos.csv", "invalid_combos.csv", "version_ranges.csv"


# --- CSV -----------------------------------------------------------------------------------------


def format_valid(combos: Iterable[Combo]) -> str:
    """`valid_combos.csv`."""
    return _csv(HEADER, [_columns(one) for one in unite(combos) if one.state is ComboState.VALID])


def format_invalid(combos: Iterable[Combo]) -> str:
    """`invalid_combos.csv`."""
    rows = [(*_columns(one), cause(one)) for one in unite(combos) if one.state in INVALID]
    return _csv(INVALID_HEADER, rows)


def format_ranges(ranges: Iterable[Range]) -> str:
    """`version_ranges.csv`; CUDA versions with a blank between."""
    rows = [
        (one.framework, str(one.capability), one.first, one.last, " ".join(one.cuda), one.state.value)
        for one in ranges
    ]
    return _csv(RANGES_HEADER, rows)


def cause(combo: Combo) -> str:
    """The word alone where it was tried or cannot be; what is only foretold is called so."""
    known = combo.basis in (VERIFIED, REPORTED) or combo.cause in tuple(Outcome)
    return combo.cause if known else f"{combo.cause} ({combo.basis})"


def _columns(combo: Combo) -> tuple[str, str, str, str]:
    return combo.framework, str(combo.capability), combo.cuda, combo.version


def _csv(header: str, rows: Iterable[Sequence[str]]) -> str:
    out = io.StringIO()
    out.write(f"{header}\n")
    csv.writer(out, lineterminator="\n").writerows(rows)
    return out.getvalue()


# --- JSON ----------------------------------------------------------------------------------------


def tables_json(tables: Tables) -> dict[str, object]:
    """Every target on every capability, also what was not tested."""
    return {
        "made": format_time(tables.made),
        "place": tables.place,
        "counts": counts(tables.combos),
        "combos": tables.combos,
        "ranges": tables.ranges,
        "notes": list(tables.notes),
    }


def counts(combos: Iterable[Combo]) -> dict[str, int]:
    """How many combinations are in each state, several targets of one counted once."""
    found = Counter(one.state for one in unite(combos))
    return {state.value: found[state] for state in ComboState}


# --- for people ----------------------------------------------------------------------------------

_NOBODY = "No key is trusted here, so nothing can be called valid."


def format_summary(tables: Tables, width: int | None = None) -> str:
    """Version ranges by framework and capability, and how many combinations there are of each state."""
    number = counts(tables.combos)
    foot = ", ".join(f"{number[state]} {state}" for state in ComboState if number[state]) or "nothing"
    lines = [f"{sum(number.values())} combinations in {tables.place}: {foot}"]
    lines += [] if tables.trusted else [_NOBODY]
    lines += tables.notes
    if not tables.ranges:
        return "\n".join(lines)
    header, rows = _range_table(tables.ranges)
    cells = [[cell or "-" for cell in row] for row in rows]
    table = format_table([one.upper() for one in header], cells, width)
    return "\n".join([table, "", *fold(lines, width)])


def _range_table(ranges: Sequence[Range]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """A row for each framework and capability, a column for each state that there is."""
    states = [
        state
        for state in ComboState
        if state is ComboState.VALID or any(one.state is state for one in ranges)
    ]
    header = ("Framework", "Capability", *(state.capitalize() for state in states))
    rows = [
        (framework, str(capability), *(_told(some, state) for state in states))
        for (framework, capability), some in _by_gpu(ranges)
    ]
    return header, rows


def _by_gpu(ranges: Iterable[Range]) -> Iterable[tuple[tuple[str, Capability], list[Range]]]:
    for key, some in groupby(ranges, key=lambda one: (one.framework, one.capability)):
        yield key, list(some)


def _told(ranges: Iterable[Range], state: ComboState) -> str:
    return ", ".join(one.versions for one in ranges if one.state is state)


def format_markdown(tables: Tables) -> str:
    """The same tables for a page: ranges, then what is valid and invalid with its reasons."""
    valid = [combo for combo in tables.combos if combo.state is ComboState.VALID]
    invalid = [combo for combo in tables.combos if combo.state in INVALID]
    undecided = [combo for combo in tables.combos if combo.state is ComboState.UNDECIDED]
    untested = [combo for combo in tables.combos if combo.state is ComboState.NOT_TESTED]
    parts = [
        "# Which framework runs on which GPU",
        f"Made {tables.made:%Y-%m-%d} of {_cell(tables.place)}.",
        "*Valid*: a verdict that can be relied on says so, for that capability and no other. *Failed*: the"
        " suite ran there and said no. *Ruled-out*: nobody ran it, and what is known speaks against it."
        " *Undecided*: it was tried, and what came of it says nothing of the image.",
        *([] if tables.trusted else [_NOBODY]),
        *(_cell(note) for note in tables.notes),
        "The same with each image's checks, and to be filtered: `imagefactory report --html DIR`.",
        "## Version ranges",
        _markdown(*_range_table(tables.ranges)),
        "## Valid",
        _markdown(
            ("Framework", "Version", "CUDA", "Compute capability", "Target", "Driver", "Proven by"),
            [(*_place(combo), combo.target, f"{combo.driver} or newer", combo.source) for combo in valid],
        ),
        "## Invalid",
        _markdown(
            ("Framework", "Version", "CUDA", "Compute capability", "Target", "State", "Cause", "Why"),
            [
                (*_place(combo), combo.target, combo.state.value, cause(combo), combo.reason)
                for combo in invalid
            ],
        ),
        "## Undecided",
        _markdown(
            ("Framework", "Version", "CUDA", "Compute capability", "Target", "Cause", "Why"),
            [(*_place(combo), combo.target, cause(combo), combo.reason) for combo in undecided],
        ),
        "## Not tested",
        _markdown(
            ("Target", "Compute capabilities"),
            [
                (target, " ".join(str(combo.capability) for combo in some))
                for target, some in groupby(untested, key=lambda combo: combo.target)
            ],
        ),
    ]
    return "\n\n".join(parts) + "\n"


def _place(combo: Combo) -> tuple[str, str, str, str]:
    return combo.framework, combo.version, combo.cuda, str(combo.capability)


def _markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    if not rows:
        return "None."
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(_cell(one) for one in line)} |" for line in lines)


def _cell(text: str) -> str:
    """One line of plain text: what Markdown or HTML would read as more is escaped."""
    plain = "".join(one if one.isprintable() else " " for one in text)
    for mark in "\\|`*[]":
        plain = plain.replace(mark, f"\\{mark}")
    return plain.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def format_files(tables: Tables) -> dict[str, str]:
    """Every file of the tables, by its name."""
    document = {"format": FORMAT, **tables_json(tables)}
    return {
        VALID_FILE: format_valid(tables.combos),
        INVALID_FILE: format_invalid(tables.combos),
        RANGES_FILE: format_ranges(tables.ranges),
        MARKDOWN_FILE: format_markdown(tables),
        JSON_FILE: json.dumps(document, indent=2, default=plain) + "\n",
    }
