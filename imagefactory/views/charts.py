"""The geometry of charts, and HTML pages from templates. Pure functions.

templates/parts.html.jinja draws the charts. Lengths are in units of a viewBox, which the page scales.
"""

from __future__ import annotations

import base64
import hashlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from imagefactory.gpu.values import platform_of
from imagefactory.progress import format_bytes

if TYPE_CHECKING:
    from jinja2 import Environment


BAR, GAP = 16.0, 6.0
LABEL, VALUE = 150.0, 70.0
WIDTH = 480.0
COLUMNS_WIDE, COLUMNS_HIGH = 150.0, 60.0
MAX_SPOKEN = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class ChartMeasure:
    """One number of a chart, with a `note` next to it. `bad` means that its check failed.

    `upper` is a second, larger number in the same unit (p95 next to p50), 0 for none.
    """

    label: str
    value: float
    unit: str = "s"
    upper: float = 0.0
    note: str = ""
    bad: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ChartBar:
    """A bar of a chart. `reach` is the length of the upper number, `end` the position of the longer end."""

    measure: ChartMeasure
    x: float
    y: float
    width: float
    height: float
    text: str
    reach: float = 0.0
    end: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class BarChart:
    """The bars under one title. `says` is the text alternative for screen readers."""

    title: str
    bars: tuple[ChartBar, ...]
    width: float
    height: float
    says: str

    def path(self, *, bad: bool) -> str:
        """Return one SVG path with the bars of failed checks (`bad`) or of the others."""
        return "".join(
            f"M{bar.x} {bar.y}h{bar.width}v{bar.height}h-{bar.width}z"
            for bar in self.bars
            if bar.measure.bad == bad
        )


def row_chart(title: str, measures: Sequence[ChartMeasure]) -> BarChart:
    """Return horizontal bars, one in each row, on one scale from 0."""
    bar_space = WIDTH - LABEL - VALUE
    scale = _scale_of(measures)
    bars = tuple(
        ChartBar(
            measure=measure,
            x=LABEL,
            y=number * (BAR + GAP),
            width=max(round(bar_space * measure.value / scale, 1), 1.0),
            height=BAR,
            text=_number(measure),
            reach=round(bar_space * measure.upper / scale, 1),
            end=round(LABEL + bar_space * max(measure.value, measure.upper) / scale, 1),
        )
        for number, measure in enumerate(measures)
    )
    return BarChart(
        title=title,
        bars=bars,
        width=WIDTH,
        height=max(len(bars) * (BAR + GAP) - GAP, 0),
        says=_spoken_text(title, bars),
    )


def column_chart(title: str, measures: Sequence[ChartMeasure]) -> BarChart:
    """Return vertical bars, one in each column: one measure across versions."""
    scale = _scale_of(measures)
    step = min(30.0, max(COLUMNS_WIDE / max(len(measures), 1), 4.0))
    bars = tuple(
        ChartBar(
            measure=measure,
            x=round(number * step, 1),
            y=round(COLUMNS_HIGH - high, 1),
            width=round(step * 0.8, 1),
            height=round(high, 1),
            text=_number(measure),
        )
        for number, measure in enumerate(measures)
        for high in (max(COLUMNS_HIGH * measure.value / scale, 1.5),)
    )
    return BarChart(
        title=f"{title}, up to {format_number(scale)} {measures[0].unit if measures else ''}",
        bars=bars,
        width=max(step * len(bars), COLUMNS_WIDE),
        height=COLUMNS_HIGH,
        says=_spoken_text(title, bars),
    )


def format_number(value: float) -> str:
    """Return a number with four significant digits and no trailing zeros, or `1.2e-07` for small numbers."""
    if not math.isfinite(value):
        return "-"
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    return f"{value:.4g}"


def format_numbers(numbers: Iterable[tuple[str, float]]) -> str:
    """Return a line for each number."""
    return "\n".join(f"{name} {format_number(number)}" for name, number in numbers)


def _scale_of(measures: Iterable[ChartMeasure]) -> float:
    """Return the end of the scale, which is never 0."""
    return max((max(measure.value, measure.upper) for measure in measures), default=0.0) or 1.0


def _number(measure: ChartMeasure) -> str:
    text = f"{format_number(measure.value)} {measure.unit}"
    return f"{text} {measure.note}" if measure.note else text


def _spoken_text(title: str, bars: Sequence[ChartBar]) -> str:
    some = "; ".join(f"{bar.measure.label} {bar.text}" for bar in bars[:MAX_SPOKEN])
    return f"{title}: {some}" + ("; and more" if len(bars) > MAX_SPOKEN else "")


# --- The templates of reports: every value is escaped


SHARED = Path(__file__).parent / "templates"


@cache
def _environment(templates: Path) -> Environment:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader((templates, SHARED)),
        undefined=StrictUndefined,
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(bytes=format_bytes, number=format_number, numbers=format_numbers, day=_day)
    environment.filters["platform"] = platform_of
    return environment


def fill(templates: Path, template: str, **values: object) -> str:
    """Fill a template (`image.html`) in a directory with values. All values are escaped."""
    return _environment(templates).get_template(f"{template}.jinja").render(**values)


def policy(script: Path | None = None) -> str:
    """Return the content security policy of a page: its style and its one script, by hash."""
    allowed = "'none'"
    if script:
        text = script.read_text("utf-8").removesuffix("\n")
        sum_ = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        allowed = f"'sha256-{sum_}'"
    return (
        f"default-src 'none'; script-src {allowed}; style-src 'self' file: 'unsafe-inline'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )


def _day(when: datetime) -> str:
    return f"{when.astimezone(UTC):%Y-%m-%d}"
