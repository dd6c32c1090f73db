"""The options of a run, and its result."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

RESULT = Path("result.json")
BATCH, TESTS, EVALUATE = 32, 1000, 20
"""The number of pictures in a step and in the test set, and of steps between evaluations on that set."""


def parse_options(description: str | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(description or "").partition("\n")[0])
    parser.add_argument("--seed", type=int, default=1, help="seed of the network and of its pictures")
    parser.add_argument("--lr", type=float, default=0.003, help="learning rate")
    parser.add_argument("--width", type=int, default=8, help="number of filters")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--save", type=int, default=50, metavar="STEPS", help="steps between checkpoints")
    parser.add_argument("--leave", action="store_true", help="exit with 85 after each checkpoint")
    parser.add_argument("--device", choices=("cpu", "gpu"), default="cpu", help="the only device to use")
    return parser.parse_args()


def write_result(
    options: argparse.Namespace,
    curve: list[Any],
    starts: list[Any],
    predictions: Iterable[float],
    labels: Iterable[int],
) -> None:
    """Write result.json under another name, then rename it.

    `curve` has rows of a step, its loss and the accuracy on the test set. `predictions` are the probabilities
    that the pictures of the test set show a dog, `labels` are 1 for those that do. `starts` has a row for
    each start of the program.
    """
    result = {
        "options": {name: getattr(options, name) for name in ("seed", "lr", "width", "steps")},
        "curve": curve,
        "starts": starts,
        "predictions": [round(float(value), 4) for value in predictions],
        "labels": [int(value) for value in labels],
    }
    new = RESULT.with_suffix(".new")
    new.write_text(json.dumps(result))
    new.replace(RESULT)
