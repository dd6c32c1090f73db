"""What a run is asked, and what it leaves behind."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

RESULT = Path("result.json")
BATCH, TESTS, LOOK = 32, 1000, 20
"""Pictures of a step, pictures that are never trained on, and steps between two looks at these."""


def options(about: str | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(about or "").partition("\n")[0])
    parser.add_argument("--seed", type=int, default=1, help="of the network and its pictures")
    parser.add_argument("--lr", type=float, default=0.003, help="how far each step goes")
    parser.add_argument("--width", type=int, default=8, help="how many filters")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--save", type=int, default=50, metavar="STEPS", help="between checkpoints")
    parser.add_argument("--leave", action="store_true", help="after each checkpoint, to be started again")
    parser.add_argument("--device", choices=("cpu", "gpu"), default="cpu", help="no other is taken")
    return parser.parse_args()


def write_result(
    asked: argparse.Namespace,
    curve: list[Any],
    starts: list[Any],
    dogs: Iterable[float],
    answers: Iterable[int],
) -> None:
    """`curve` has rows of a step, its loss and the share of right answers; `dogs` says how sure it is that a
    picture shows a dog, `answers` whether it does."""
    result = {
        "asked": {name: getattr(asked, name) for name in ("seed", "lr", "width", "steps")},
        "curve": curve,
        "starts": starts,
        "dogs": [round(float(one), 4) for one in dogs],
        "answers": [int(one) for one in answers],
    }
    beside = RESULT.with_suffix(".new")
    beside.write_text(json.dumps(result))
    beside.replace(RESULT)
