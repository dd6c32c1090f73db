#!/usr/bin/env python3
"""Reads run-*/result.json: a table of the runs, what they are worth together, a picture of how they learnt.

It writes results.csv and curves.svg into the folder where it stands, and needs Python alone.
"""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

WIDE, HIGH, EDGE, LEAST = 640, 360, 48, 0.5
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#000000")


def read(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "result.json").read_text())
    return found | {"run": int(folder.name.rpartition("-")[2]), "right": found["curve"][-1][2]}


def together(runs: Sequence[dict[str, Any]]) -> float:
    """How often the mean of what all runs say is right."""
    answers = runs[0]["answers"]
    means = (sum(said) / len(runs) for said in zip(*(run["dogs"] for run in runs), strict=True))
    return sum((mean > 0.5) == answer for mean, answer in zip(means, answers, strict=True)) / len(answers)


def picture(runs: Sequence[dict[str, Any]]) -> str:
    """The share of right answers by step, a line a run."""
    last = max(run["curve"][-1][0] for run in runs)

    def place(step: float, right: float) -> str:
        across = EDGE + step / last * (WIDE - 4 * EDGE)
        return f"{across:.1f},{HIGH - EDGE - (right - LEAST) / (1 - LEAST) * (HIGH - 2 * EDGE):.1f}"

    def text(at: str, words: str, colour: str = "#333") -> str:
        x, y = at.split(",")
        return f'<text x="{x}" y="{y}" fill="{colour}">{escape(words)}</text>'

    lines = [text(f"{EDGE},{EDGE / 2}", f"right answers by step, {len(runs)} runs")]
    for percent in range(50, 101, 10):
        left, right = place(0, percent / 100), place(last, percent / 100)
        lines.append(f'<polyline points="{left} {right}" stroke="#ddd"/>')
        lines.append(text(f"8,{left.partition(',')[2]}", f"{percent} %"))
    for number, run in enumerate(runs):
        colour = COLOURS[number % len(COLOURS)]
        points = " ".join(place(step, max(right, LEAST)) for step, _, right in run["curve"])
        lines.append(f'<polyline points="{points}" stroke="{colour}" stroke-width="2"/>')
        if number < 16:
            at = f"{WIDE - 2.7 * EDGE:.0f},{EDGE + 16 * number}"
            lines.append(text(at, f"run {run['run']}: {run['right']:.1%}", colour))
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDE} {HIGH}" font-family="sans-serif" '
    return "\n".join(
        [
            f'{head}font-size="12" fill="none">',
            '<rect width="100%" height="100%" fill="#fff"/>',
            *lines,
            "</svg>",
            "",
        ]
    )


def main() -> int:
    runs = sorted(
        (read(path.parent) for path in Path().glob("run-*/result.json")), key=lambda run: run["run"]
    )
    if not runs:
        print("there is no run-*/result.json here", file=sys.stderr)
        return 1
    columns = ["run", *runs[0]["asked"], "right", "starts"]
    rows = [
        [run["run"], *run["asked"].values(), f"{run['right']:.4f}", len(run["starts"])]
        for run in sorted(runs, key=lambda run: -run["right"])
    ]
    with Path("results.csv").open("w", newline="") as file:
        csv.writer(file).writerows([columns, *rows])
    Path("curves.svg").write_text(picture(runs))
    for row in [columns, *rows]:
        print("".join(f"{cell!s:>8}" for cell in row))
    print(f"all {len(runs)} together: {together(runs):.4f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
