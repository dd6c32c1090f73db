"""Starts a program of the portability suite inside an image.

    python -I -B portable.py export ASKED FOLDER
    python -I -B portable.py try ASKED FOLDER

The second starts itself as `portable.py one ASKED PART RUNTIME MODEL`.
"""

from __future__ import annotations

import faulthandler
import importlib
import os
import runpy
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
PROGRAMS = {"export": ("exporting", "main", 2), "try": ("trying", "main", 2), "one": ("trying", "one", 4)}


def main(arguments: list[str]) -> int:
    """Exit code 0 when everything holds, 1 when something does not, 2 for other arguments than these."""
    module, function, count = PROGRAMS.get(arguments[0] if arguments else "", ("", "", 0))
    if not module or len(arguments) != 1 + count:
        print("usage: python -I -B portable.py export|try ASKED FOLDER", file=sys.stderr)
        return 2
    faulthandler.enable()
    load = runpy.run_path(os.path.join(HERE, "smoke.py"))
    load["load_suite"](HERE)
    program = importlib.import_module(f"{load['PACKAGE']}.portability.{module}")
    code: int = getattr(program, function)(*arguments[1:])
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
