"""Import one module and report the errors.

Started as `python import_module.py FD MODULE`, it writes one JSON object to the file descriptor FD. `errors`
has the text of the exception and of its explicit causes, and is empty if the module loads. A module that ends
the process writes nothing there.
"""

from __future__ import annotations

import importlib
import json
import os
import sys

LONGEST = 300


def describe(error: BaseException) -> str:
    """Return the type and text of an exception in one line: of several lines, the first and the last."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = lines[0] if len(lines) < 2 else f"{lines[0][:LONGEST]} ... {lines[-1][:LONGEST]}" if lines else ""
    return f"{type(error).__name__}: {text[: 2 * LONGEST]}" if lines else type(error).__name__


def main(descriptor: int, name: str) -> None:
    errors: list[str] = []
    try:
        importlib.import_module(name)
    except BaseException as failure:
        error: BaseException | None = failure
        while error is not None and len(errors) < 8:
            errors.append(describe(error))
            error = error.__cause__
    with os.fdopen(descriptor, "w", encoding="utf-8", errors="replace") as file:
        json.dump({"errors": errors}, file)
    sys.stderr.flush()
    os._exit(0)  # whatever threads the module has started


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
