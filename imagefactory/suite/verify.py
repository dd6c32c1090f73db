"""Start the GPU suite inside an image: python -I -B verify.py EXPECTATIONS REPORT.

It starts each part as `verify.py --part PART EXPECTATIONS PARTREPORT`. A part that uses several GPUs starts a
process for each of them as `verify.py --rank FOLDER RANK`.
"""

from __future__ import annotations

import importlib
import os
import runpy
import sys

HERE = os.path.dirname(os.path.abspath(__file__))


def main(arguments: list[str]) -> int:
    """Return 0 if all checks pass, 1 if one fails, 2 for wrong arguments."""
    part = arguments[1:2] if arguments[:1] == ["--part"] else []
    rank = arguments[:1] == ["--rank"]
    files = arguments[2:] if part else arguments[1:] if rank else arguments
    if len(files) != 2:
        print("usage: python -I -B verify.py [--part PART] EXPECTATIONS REPORT", file=sys.stderr)
        return 2
    load = runpy.run_path(os.path.join(HERE, "smoke.py"))
    load["load_suite"](HERE)
    module = "ranks" if rank else "part" if part else "suite"
    return int(importlib.import_module(f"{load['PACKAGE']}.gpu.{module}").main(*part, *files))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
