"""Start a program of the portability suite inside an image.

    python -I -B portable.py export REQUEST DIRECTORY
    python -I -B portable.py try REQUEST DIRECTORY

The second program starts itself again as `portable.py one REQUEST PART RUNTIME MODEL`.
"""

from __future__ import annotations

import faulthandler
import importlib
import os
import runpy
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
PROGRAMS = {
    "export": ("exporting", "main", 2),
    "try": ("trying", "main", 2),
    "one": ("trying", "run_models", 4),
}


def main(arguments: list[str]) -> int:
    """Return 0 if all models pass, 1 if one fails, 2 for wrong arguments."""
    module, function, count = PROGRAMS.get(arguments[0] if arguments else "", ("", "", 0))
    if not module or len(arguments) != 1 + count:
        print("usage: python -I -B portable.py export|try REQUEST DIRECTORY", file=sys.stderr)
        return 2
    faulthandler.enable()
    load = runpy.run_path(os.path.join(HERE, "smoke.py"))
    load["load_suite"](HERE)
    program = importlib.import_module(f"{load['PACKAGE']}.portability.{module}")
    return int(getattr(program, function)(*arguments[1:]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
