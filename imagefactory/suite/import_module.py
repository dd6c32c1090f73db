"""Imports one module and tells what came of it.

Started as `python import_module.py FD MODULE`: one JSON object goes to the file descriptor FD, `errors`
being the exception's text and those of what it was explicitly raised from, empty where the module loads.
A module that takes the process down leaves nothing there.
"""

from __future__ import annotations

import importlib
import json
import os
import sys

LONGEST = 300


def describe(error: BaseException) -> str:
    """Return an exception's type and text as one line; of several lines the first and the last."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = lines[0] if len(lines) < 2 else f"{lines[0][:LONGEST]} ... {lines[-1][:LONGEST]}" if lines else ""
    return f"{type(error).__name__}: {text[: 2 * LONGEST]}" if lines else type(error).__name__


def import_one(name: str) -> list[str]:
    errors: list[str] = []
    try:
        importlib.import_module(name)
    except BaseException as failure:
        error: BaseException | None = failure
        while error is not None and len(errors) < 8:
            errors.append(describe(error))
            error = error.__cause__
    return errors


def main(descriptor: int, name: str) -> None:
    errors = import_one(name)
    with os.fdopen(descriptor, "w", encoding="utf-8", errors="replace") as file:
        json.dump({"errors": errors}, file)
    sys.stderr.flush()
    os._exit(0)  # threads that the module has started are no matter here


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
