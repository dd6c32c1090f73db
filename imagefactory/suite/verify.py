"""Starts the GPU suite inside an image: python -I -B verify.py EXPECTATIONS REPORT.

It starts each part of itself as `verify.py --part PART EXPECTATIONS PARTREPORT`, and that, where GPUs work
together, a process for each as `verify.py --rank FOLDER RANK`.
"""

from __future__ import annotations

import importlib
import os
import runpy
import sys

HERE = os.path.dirname(os.path.abspath(__file__))


def main(arguments: list[str]) -> int:
    """Exit code 0 when everything holds, 1 when a check does not, 2 for other arguments than these."""
    part = arguments[1:2] if arguments[:1] == ["--part"] else []
    rank = arguments[:1] == ["--rank"]
    files = arguments[2:] if part else arguments[1:] if rank else arguments
    if len(files) != 2:
        print("usage: python -I -B verify.py [--part PART] EXPECTATIONS REPORT", file=sys.stderr)
        return 2
    load = runpy.run_path(os.path.join(HERE, "smoke.py"))
    load["load_suite"](HERE)
    gpu = f"{load['PACKAGE']}.gpu"
    if rank:
        return int(importlib.import_module(f"{gpu}.ranks").main(*files))
    if part:
        code: int = importlib.import_module(f"{gpu}.part").main(part[0], *files)
    else:
        code = importlib.import_module(f"{gpu}.suite").main(*files)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
