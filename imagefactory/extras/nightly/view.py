"""The report of a nightly run as text: for a terminal, a mail or an issue. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime
from itertools import groupby
from typing import Any

from imagefactory.extras.nightly.changes import NightlyReport, NightlyRow
from imagefactory.extras.nightly.nights import last_nightly
from imagefactory.serialize import printable_line
from imagefactory.settings.load import Settings
from imagefactory.views.text import fold, wrap
from imagefactory.views.verdicts import format_ages

WIDTH = 80
MOST = 60
"""The limit of rows in one section of a mail or an issue. The page has all."""
SECTIONS = (("broken", "Broken"), ("built", "Built"), ("verified", "Verified"), ("due", "Due"))
"""The sections of a page; rows that need a person come first."""


def headline(night: NightlyReport) -> str:
    """Return `2 built, 5 verified, 1 broken, 3 due`."""
    titles = dict(SECTIONS)
    kinds = ("built", "verified", "broken", "due")
    return ", ".join(f"{len(rows_of(night, kind))} {titles[kind].lower()}" for kind in kinds)


def rows_of(night: NightlyReport, kind: str) -> Sequence[NightlyRow]:
    rows = getattr(night, kind)
    assert isinstance(rows, tuple)
    return rows


def title_of(row: NightlyRow) -> str:
    """Return `pytorch-2.3-cu121 on 8.0, 9.0`."""
    return f"{row.what} on {row.on}" if row.on else row.what


def cause_text(row: NightlyRow) -> str:
    """Return `no-gpu: cuInit says 100 (gpu07, gpu08)`."""
    return f"{row.reason} ({', '.join(row.machines)})" if row.machines else row.reason


def format_took(start: datetime, end: datetime) -> str:
    """Return `3 h 12 min`."""
    minutes = round((end - start).total_seconds() / 60)
    return f"{minutes // 60} h {minutes % 60} min" if minutes >= 60 else f"{minutes} min"


def last_page(settings: Settings) -> dict[str, Any] | None:
    """Return the values for the page of the last run, None if there was no run.

    A report loads this by name.
    """
    night = last_nightly(settings)
    return page_values(night) if night else None


def page_values(night: NightlyReport) -> dict[str, Any]:
    return {
        "report": night,
        "headline": headline(night),
        "ages": format_ages(night.verdict_ages),
        "took": format_took(night.started, night.ended),
        "parts": [
            (kind, title, [(title_of(row), row) for row in rows_of(night, kind)]) for kind, title in SECTIONS
        ],
    }


def format_nightly(night: NightlyReport, width: int | None = WIDTH) -> str:
    """Return the report in lines of `width` columns."""
    lines = [
        f"night of {night.started:%Y-%m-%d %H:%M} UTC, {format_took(night.started, night.ended)}: "
        f"{headline(night)}",
        f"{night.place}: {format_ages(night.verdict_ages)}",
        *night.notes,
    ]
    lines = fold(lines, width)
    for kind, title in SECTIONS:
        if rows := rows_of(night, kind):
            lines += ["", title.lower(), *_lines(rows, kind, width or WIDTH)]
    return "\n".join(lines)


def _lines(rows: Sequence[NightlyRow], kind: str, width: int) -> Iterator[str]:
    for row in rows[:MOST]:
        reason = "" if kind == "built" else cause_text(row)
        first = f"  {title_of(row)}"
        if reason and len(first) + 2 + len(reason) <= width:
            yield f"{first}: {reason}"
        else:
            yield first + (":" if reason else "")
            yield from (f"      {line}" for line in wrap(reason, width - 6))
        if row.hint:
            yield from (f"      {line}" for line in wrap(f"hint: {row.hint}", width - 6))
    if len(rows) > MOST:
        yield f"  and {len(rows) - MOST} more"


def format_issue(night: NightlyReport) -> str:
    """Return the text of the issue in Markdown, empty if nothing is broken and there are no notes."""
    if not night.broken and not night.notes:
        return ""
    ages = format_ages(night.verdict_ages)
    lines = [f"The night of {night.started:%Y-%m-%d %H:%M} UTC: {headline(night)}; {ages}."]
    lines += [f"\n**{_quoted(note)}**" for note in night.notes]
    for code, some in groupby(night.broken[:MOST], key=lambda row: row.what):
        lines.append(f"\n- {_quoted(code)}")
        for row in some:
            on = f"on {row.on}: " if row.on else ""
            lines.append(f"  - {_quoted(on + cause_text(row))}")
            lines += [f"    *hint:* {_quoted(row.hint)}"] if row.hint else []
    if len(night.broken) > MOST:
        lines.append(f"\nand {len(night.broken) - MOST} more")
    return "\n".join(lines) + "\n"


def _quoted(text: str) -> str:
    """Return the text as code, so that an error message has no mentions, links or markup."""
    text = printable_line(text)
    fence = "`" * (max((len(list(run)) for mark, run in groupby(text) if mark == "`"), default=0) + 1)
    return f"{fence} {text} {fence}" if "`" in text else f"`{text}`"


# --- Metrics of a run for the textfile collector of Prometheus, in its text format 0.0.4. Pure


PREFIX = "imagefactory"


def format_metrics(night: NightlyReport, catalog_expires: datetime | None) -> str:
    """Return the lines of a `.prom` file. `catalog_expires` is None if no signed catalog is known."""
    label = f'registry="{_escape(night.place)}"'
    rows = {kind: len(rows_of(night, kind)) for kind, _ in SECTIONS}
    ages, expires = night.verdict_ages, catalog_expires
    gauges: list[tuple[str, str, dict[str, float]]] = [
        ("night_start_timestamp_seconds", "When the last night began", {label: night.started.timestamp()}),
        ("night_end_timestamp_seconds", "When the last night ended", {label: night.ended.timestamp()}),
        ("night_exit_code", "Exit code of the last night, 0 if nothing is broken", {label: night.exit_code}),
        (
            "night_rows",
            "What the last night built and verified, what is broken and what is due",
            {f'{label},kind="{kind}"': count for kind, count in rows.items()},
        ),
        (
            "verdicts_expiring",
            "Verdicts in use that expire within 14 days",
            {label: ages.expiring},
        ),
    ]
    if ages.oldest:
        text = "When the oldest verdict in use was issued"
        gauges.append(("verdict_oldest_timestamp_seconds", text, {label: ages.oldest.timestamp()}))
    if expires:
        text = "When the newest signed catalog expires"
        gauges.append(("catalog_expires_timestamp_seconds", text, {label: expires.timestamp()}))
    lines = []
    for name, meaning, samples in gauges:
        lines += [f"# HELP {PREFIX}_{name} {meaning}", f"# TYPE {PREFIX}_{name} gauge"]
        lines += [f"{PREFIX}_{name}{{{labels}}} {value:.0f}" for labels, value in samples.items()]
    return "\n".join(lines) + "\n"


def _escape(text: str) -> str:
    """Return the value of a label with backslash, quote and line feed escaped."""
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
