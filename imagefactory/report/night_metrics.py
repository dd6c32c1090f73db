"""A night as metrics for Prometheus's textfile collector, in its text format 0.0.4. Pure."""

from __future__ import annotations

from datetime import datetime

from imagefactory.extras.nightly.changes import NightReport
from imagefactory.extras.nightly.view import KINDS, rows_of

PREFIX = "imagefactory"


def format_metrics(night: NightReport, catalog_expires: datetime | None) -> str:
    """Return the lines of a `.prom` file. `catalog_expires` is None where no signed catalog is known."""
    place = f'registry="{_escape(night.place)}"'
    rows = {kind: len(rows_of(night, kind)) for kind, _ in KINDS}
    oldest, expires = night.ages.oldest, catalog_expires
    gauges: list[tuple[str, str, dict[str, float]]] = [
        ("night_start_timestamp_seconds", "When the last night began", {place: night.started.timestamp()}),
        ("night_end_timestamp_seconds", "When the last night ended", {place: night.ended.timestamp()}),
        ("night_exit_code", "Exit code of the last night, 0 if nothing is broken", {place: night.code}),
        (
            "night_rows",
            "What the last night built and verified, what is broken and what is due",
            {f'{place},kind="{kind}"': count for kind, count in rows.items()},
        ),
        ("verdicts_expiring", "Verdicts in use that expire within 14 days", {place: night.ages.lapsing}),
    ]
    if oldest:
        text = "When the oldest verdict in use was issued"
        gauges.append(("verdict_oldest_timestamp_seconds", text, {place: oldest.timestamp()}))
    if expires:
        text = "When the newest signed catalog expires"
        gauges.append(("catalog_expires_timestamp_seconds", text, {place: expires.timestamp()}))
    lines = []
    for name, meaning, samples in gauges:
        lines += [f"# HELP {PREFIX}_{name} {meaning}", f"# TYPE {PREFIX}_{name} gauge"]
        lines += [f"{PREFIX}_{name}{{{labels}}} {value:.0f}" for labels, value in samples.items()]
    return "\n".join(lines) + "\n"


def _escape(text: str) -> str:
    """A label's value: backslash, quote and line feed are escaped."""
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
