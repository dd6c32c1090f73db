"""What was measured as one table and one picture: how many times as fast, or as small. Pure."""

from __future__ import annotations

import math
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

from benchmarks.readings import Readings

SECONDS, BYTES = "s", "bytes"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """`ours` against `theirs`, both names of readings; or against `most`, a limit.

    `times` is how many times `theirs` is to be of `ours`, at least; 0 where nothing is asked for.
    """

    case: str
    ours: str
    told: str
    theirs: str = ""
    most: float = 0.0
    times: float = 0.0
    unit: str = SECONDS


TABLES = {
    "floors": ("floors",),
    "benchmarks": ("start", "sif", "bare", "publish", "eight"),
}
"""The cases of each table."""

TITLES = {"floors": "imagefactory against the least work", "benchmarks": "imagefactory against others"}

RIVALS = {
    "dockerfile": "rendered Dockerfile, docker push",
    "best": "BuildKit, uv, cache mount, zstd",
    "split": "the same, hand-split",
    "buildah": "rendered Dockerfile, buildah, zstd",
}


def _against(case: str, key: str, goals: dict[str, float]) -> list[Row]:
    return [
        Row(case=case, ours=f"{key}/assemble", theirs=f"{key}/{way}", told=RIVALS[way], times=times)
        for way, times in goals.items()
    ]


def _rows(table: str) -> tuple[Row, ...]:
    squashed, one_pass = "mksquashfs, its defaults", "one pass in C"
    if table == "floors":
        return (
            Row(
                case="first command, fresh machine", ours="fresh/imagefactory", theirs="fresh/floor",
                told=f"fetch, base, {one_pass}", times=1 / 1.2,
            ),
            *(
                Row(
                    case=f"lock to image, {state}", ours=f"{state}/zstd", theirs=f"{state}/pass",
                    told=one_pass, times=1 / 1.15,
                )
                for state in ("warm", "cold")
            ),
            *(
                Row(
                    case=case, ours=f"floors/{name}", theirs=f"floors/{name} floor",
                    told=f"fetch, {one_pass}, PUT", times=1 / 1.2,
                )
                for case, name in (
                    ("first build and push", "first"),
                    ("one small package changed", "changed"),
                )
            ),
            Row(case="peak memory of all processes", ours="memory", most=400e6, told="", unit=BYTES),
        )  # fmt: skip
    return (
        *_against("first build and push", "first", {"dockerfile": 0, "best": 0, "split": 0, "buildah": 0}),
        *_against(
            "one small package changed",
            "changed",
            {"dockerfile": 0, "best": 0, "split": 0, "buildah": 0},
        ),
        *_against("nothing changed", "same", {"dockerfile": 1, "best": 1, "split": 1, "buildah": 1}),
        *_against("eight targets that share packages", "eight", {"best": 0, "split": 0}),
        Row(case="fresh machine, registry has it all", ours="bare/push", most=0.5, told="no byte of a layer"),
        *_against("docker pulls it", "docker", {"dockerfile": 0, "best": 1, "split": 0}),
        *_against("podman pulls it", "podman", {"best": 1}),
        Row(case=".sif", ours="sif/first", theirs="sif/mksquashfs", told=squashed, times=10),
        Row(case=".sif", ours="sif/first", theirs="sif/apptainer", told="apptainer build, zstd 1"),
        Row(
            case=".sif after one small change", ours="sif/changed", theirs="sif/mksquashfs",
            told=squashed, times=20,
        ),
        Row(
            case="size of the .sif", ours="sif/first bytes", theirs="sif/mksquashfs bytes",
            told=squashed, times=1 / 1.1, unit=BYTES,
        ),
        Row(
            case="sent by the first push", ours="first/sent", theirs="first/unique", told="unique bytes",
            times=1 / 1.02, unit=BYTES,
        ),
        Row(
            case="in the registry", ours="first/assemble bytes", theirs="first/best bytes",
            told=RIVALS["best"], unit=BYTES,
        ),
        Row(case="imagefactory list", ours="start/list", most=0.3, told=""),
        Row(case="imagefactory --help", ours="start/--help", most=0.3, told=""),
    )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    row: Row
    ours: str
    theirs: str
    ratio: float

    @property
    def met(self) -> bool:
        goal = 1.0 if self.row.most else self.row.times
        return round(self.ratio, 2) >= round(goal, 2)  # as it is told


def _found(table: str, readings: Readings) -> list[Found]:
    if "first/best" in readings.values and "eight/assemble" in readings.values:
        derived = readings.middle("first/best") + 7 * readings.middle("changed/best")
        readings.values["eight/best"] = [derived]
    found = []
    for row in _rows(table):
        if row.ours in readings.values and (row.most or row.theirs in readings.values):
            limit = f"at most {_amount(row.most, row.unit)}"
            theirs = row.most or readings.middle(row.theirs)
            found.append(
                Found(
                    row=row,
                    ours=_value(readings, row.ours, row.unit),
                    theirs=limit if row.most else _value(readings, row.theirs, row.unit),
                    ratio=theirs / readings.middle(row.ours),
                )
            )
    return found


def _value(readings: Readings, name: str, unit: str) -> str:
    numbers = readings.values[name]
    text = _amount(readings.middle(name), unit)
    if len(numbers) > 1 and unit == SECONDS:
        text += f" ({min(numbers):.2f} to {max(numbers):.2f})"
    if f"{name} cpu" in readings.values:
        text += f", {readings.middle(f'{name} cpu'):.0f} CPU s"
    return text


def _amount(number: float, unit: str) -> str:
    if unit == BYTES:
        return f"{number / 1e6:.0f} MB"
    return f"{number:.2f} s" if number < 10 else f"{number:.1f} s"


def _times(ratio: float, unit: str) -> str:
    better, worse = ("faster", "slower") if unit == SECONDS else ("smaller", "larger")
    shown = max(ratio, 1 / ratio)
    text = f"{shown:.2f}x" if shown < 10 else f"{shown:.0f}x"
    return f"{text} {better if ratio >= 1 else worse}"


def _goal(row: Row) -> str:
    if not row.times:
        return ""
    if row.times == 1:
        return "not slower"
    return ("at least " if row.times > 1 else "at most ") + _times(row.times, row.unit)


def _machine(readings: Readings, days: Sequence[str]) -> str:
    trials = sorted({len(numbers) for name, numbers in readings.values.items() if name != "eight/best"})
    shown = f"{trials[0]}" if len(trials) == 1 else f"{trials[0]} to {trials[-1]}"
    kind = "one trial" if trials == [1] else f"medians of {shown} trials"
    when = days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"
    return f"{when}, {os.cpu_count()} cores, Linux {platform.release().split('-')[0]}, {kind}"


def format_table(table: str, readings: Readings, days: Sequence[str]) -> str:
    """Markdown. What has no reading has no row."""
    lines = [
        f"| {_machine(readings, days)} | imagefactory | against | | | goal |",
        "|---|---|---|---|---|---|",
    ]
    case = ""
    for one in _found(table, readings):
        row = one.row
        name = row.case if row.case != case else ""
        case = row.case
        times = _times(one.ratio, row.unit) if not row.most else ""
        mark = "" if not (row.times or row.most) else "met" if one.met else "**not met**"
        goal = ", ".join(part for part in (_goal(row), mark) if part)
        lines.append(f"| {name} | {one.ours} | {row.told} | {one.theirs} | {times} | {goal} |")
    return "\n".join(lines) + "\n"


NAME, SIDE, WIDTH, LINE, TOP = 250, 225, 440, 22, 64
STYLE = """svg{font:13px system-ui,-apple-system,"Segoe UI",Roboto,"DejaVu Sans",sans-serif}
.bg{fill:#fff}text{fill:#1b2127}.d{fill:#525d68;font-size:11px}.b{font-weight:700}.g{stroke:#d5dae0}
.one{stroke:#525d68;stroke-width:1.5}.goal{stroke:#7a4f00;stroke-width:2.5}
.good{fill:#0b6e4f}.bad{fill:#b42318}.plain{fill:#525d68}
@media(prefers-color-scheme:dark){.bg{fill:#0d1117}text{fill:#e6ebf0}.d{fill:#a3afbb}.g{stroke:#2b343d}
.one{stroke:#a3afbb}.goal{stroke:#f2b94b}.good{fill:#3ecf9a}.bad{fill:#ff8a7a}.plain{fill:#a3afbb}}"""


def format_picture(table: str, readings: Readings, days: Sequence[str]) -> str:
    """An SVG: one bar a row from 1x to its ratio, on a logarithmic axis, and its goal as a mark."""
    found = _found(table, readings)
    low = math.floor(math.log10(min((one.ratio for one in found), default=1)))
    high = math.ceil(math.log10(max((max(one.ratio, one.row.times) for one in found), default=1)))

    def place(ratio: float) -> float:
        return round(NAME + SIDE + (math.log10(ratio) - low) / max(high - low, 1) * WIDTH, 1)

    bottom = TOP + LINE * len(found)
    width, height = NAME + SIDE + WIDTH + 90, bottom + 34
    parts = [
        f'<text class="b" x="16" y="24">{TITLES[table]}</text>',
        f'<text class="d" x="16" y="42">{escape(_machine(readings, days))}</text>',
    ]
    for power in range(low, high + 1):
        x, label = place(10**power), f"{10**power:g}x"
        kind = "one" if power == 0 else "g"
        parts.append(f'<line class="{kind}" x1="{x}" x2="{x}" y1="{TOP - 6}" y2="{bottom}"/>')
        parts.append(f'<text class="d" x="{x}" y="{TOP - 10}" text-anchor="middle">{label}</text>')
    case = ""
    for number, one in enumerate(found):
        row, y = one.row, TOP + LINE * number
        if row.case != case:
            parts.append(f'<text x="16" y="{y + 15}">{escape(row.case)}</text>')
        case = row.case
        told = f"{row.told} {one.theirs}".strip() if row.most else row.told
        parts.append(f'<text class="d" x="{NAME}" y="{y + 15}">{escape(told)}</text>')
        ends = sorted((place(1), place(one.ratio)))
        asked = row.times or bool(row.most)
        kind = "plain" if not asked else "good" if one.met else "bad"
        size = max(ends[1] - ends[0], 2)
        parts.append(
            f'<rect class="{kind}" x="{ends[0]}" y="{y + 4}" width="{size:.1f}" height="14" rx="2"/>'
        )
        if row.times:
            x = place(row.times)
            parts.append(f'<line class="goal" x1="{x}" x2="{x}" y1="{y + 1}" y2="{y + 21}"/>')
        text = _times(one.ratio, row.unit)
        parts.append(f'<text class="d" x="{NAME + SIDE + WIDTH + 8}" y="{y + 15}">{text}</text>')
    says = f"{sum(one.met for one in found if one.row.times or one.row.most)} goals met"
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" role="img" aria-label="{says}">\n<title>{says}</title>\n'
        f"<style>\n{STYLE}\n</style>\n"
        f'<rect class="bg" width="{width}" height="{height}" rx="8"/>\n'
    )
    told = "Right of 1x: faster or smaller than what stands beside the case. The mark is the goal."
    foot = f'<text class="d" x="16" y="{height - 12}">{told}</text>'
    return head + "\n".join([*parts, foot]) + "\n</svg>\n"


CURVES = (("good", ""), ("bad", "6 3"), ("plain", "2 3"), ("goal", ""))


def format_curves(title: str, about: str, curves: Mapping[str, Sequence[tuple[int, float]]]) -> str:
    """An SVG: a line for each name over its (size, seconds), both axes logarithmic."""
    sizes = sorted({size for points in curves.values() for size, _ in points})
    seconds = [number for points in curves.values() for _, number in points]
    low, high = math.floor(math.log10(min(seconds))), math.ceil(math.log10(max(seconds)))
    left, width, height, bottom = 70, 420, 240, 300
    span = max(math.log10(sizes[-1] / sizes[0]), 1)

    def x(size: int) -> float:
        return round(left + math.log10(size / sizes[0]) / span * width, 1)

    def y(number: float) -> float:
        return round(bottom - (math.log10(number) - low) / max(high - low, 1) * height, 1)

    parts = [
        f'<text class="b" x="16" y="24">{escape(title)}</text>',
        f'<text class="d" x="16" y="42">{escape(about)}</text>',
    ]
    for power in range(low, high + 1):
        row = y(10**power)
        parts.append(f'<line class="g" x1="{left}" x2="{left + width}" y1="{row}" y2="{row}"/>')
        parts.append(f'<text class="d" x="{left - 8}" y="{row + 4}" text-anchor="end">{10**power:g} s</text>')
    for size in sizes:
        parts.append(f'<text class="d" x="{x(size)}" y="{bottom + 20}" text-anchor="middle">{size:,}</text>')
    for number, (name, points) in enumerate(curves.items()):
        kind, dashes = CURVES[number % len(CURVES)]
        path = " ".join(f"{x(size)},{y(value)}" for size, value in points)
        parts.append(f'<polyline class="{kind} curve" stroke-dasharray="{dashes}" points="{path}"/>')
        end, value = points[-1]
        label = f"{escape(name)} {value:.2f} s"
        parts.append(f'<text class="d" x="{x(end) + 10}" y="{y(value) + 4}">{label}</text>')
    whole = f"{left + width + 180} {bottom + 40}"
    curve = (
        ".curve{fill:none;stroke-width:2.5}.good{stroke:#0b6e4f}.bad{stroke:#b42318}.plain{stroke:#525d68}"
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {whole}" width="{left + width + 180}" '
        f'height="{bottom + 40}" role="img" aria-label="{escape(title)}">\n<title>{escape(title)}</title>\n'
        f"<style>\n{STYLE}\n{curve}\n</style>\n"
        f'<rect class="bg" width="{left + width + 180}" height="{bottom + 40}" rx="8"/>\n'
    ) + "\n".join([*parts, "</svg>\n"])
