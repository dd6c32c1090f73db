#!/usr/bin/env python3
"""Read run-*/result.json. Write the table results.csv and the plot curves.svg, and print the table.

It works in the current directory and needs only Python.
"""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

WIDTH, HEIGHT, MARGIN, MINIMUM = 640, 360, 48, 0.5
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#000000")


def read(directory: Path) -> dict[str, Any]:
    result: dict[str, Any] = json.loads((directory / "result.json").read_text())
    return result | {"run": int(directory.name.rpartition("-")[2]), "accuracy": result["curve"][-1][2]}


def ensemble_accuracy(runs: Sequence[dict[str, Any]]) -> float:
    """Return the accuracy of the mean of all predictions."""
    labels = runs[0]["labels"]
    means = (sum(values) / len(runs) for values in zip(*(run["predictions"] for run in runs), strict=True))
    return sum((mean > 0.5) == label for mean, label in zip(means, labels, strict=True)) / len(labels)


def plot(runs: Sequence[dict[str, Any]]) -> str:
    """Return an SVG plot of the accuracy by step, with a line for each run."""
    last = max(run["curve"][-1][0] for run in runs)

    def point(step: float, accuracy: float) -> str:
        x = MARGIN + step / last * (WIDTH - 4 * MARGIN)
        return f"{x:.1f},{HEIGHT - MARGIN - (accuracy - MINIMUM) / (1 - MINIMUM) * (HEIGHT - 2 * MARGIN):.1f}"

    def text(position: str, words: str, color: str = "#333") -> str:
        x, y = position.split(",")
        return f'<text x="{x}" y="{y}" fill="{color}">{escape(words)}</text>'

    lines = [text(f"{MARGIN},{MARGIN / 2}", f"accuracy by step, {len(runs)} runs")]
    for percent in range(50, 101, 10):
        left, right = point(0, percent / 100), point(last, percent / 100)
        lines.append(f'<polyline points="{left} {right}" stroke="#ddd"/>')
        lines.append(text(f"8,{left.partition(',')[2]}", f"{percent} %"))
    for number, run in enumerate(runs):
        color = COLORS[number % len(COLORS)]
        points = " ".join(point(step, max(accuracy, MINIMUM)) for step, _, accuracy in run["curve"])
        lines.append(f'<polyline points="{points}" stroke="{color}" stroke-width="2"/>')
        if number < 16:
            position = f"{WIDTH - 2.7 * MARGIN:.0f},{MARGIN + 16 * number}"
            lines.append(text(position, f"run {run['run']}: {run['accuracy']:.1%}", color))
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
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
        print("error: there is no run-*/result.json here", file=sys.stderr)
        return 1
    columns = ["run", *runs[0]["options"], "accuracy", "starts"]
    rows = [
        [run["run"], *run["options"].values(), f"{run['accuracy']:.4f}", len(run["starts"])]
        for run in sorted(runs, key=lambda run: -run["accuracy"])
    ]
    with Path("results.csv").open("w", newline="") as file:
        csv.writer(file).writerows([columns, *rows])
    Path("curves.svg").write_text(plot(runs))
    for row in [columns, *rows]:
        print("".join(f"{cell!s:>10}" for cell in row))
    print(f"all {len(runs)} runs together: {ensemble_accuracy(runs):.4f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
