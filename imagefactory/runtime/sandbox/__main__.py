"""Start the program: python -I -S .../runtime/sandbox PLAN_FD STATUS_FD [build]

It reads a plan (JSON, from `unshare.plan`) from PLAN_FD and writes JSON lines to STATUS_FD: when the command
runs (`started`), how it ended (`ended`) or why it never started (`failed`). `build` runs mmdebstrap instead
of an image's command, and writes only errors.

    python -I -S .../runtime/sandbox relay LOST_FD PASSED_FD PROGRAM ARGUMENT...

starts a program of the host with its own pipes and terminals (terminals.py).

The directory becomes the package `imagefactory_sandbox`, and leaves Python's search path. So none of its
names can hide a module of the standard library.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
import types

PACKAGE = "imagefactory_sandbox"

if __name__ == "__main__":
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C before the keeper listens ends it silently
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [path for path in sys.path if path != here]
    package = sys.modules[PACKAGE] = types.ModuleType(PACKAGE)
    package.__path__ = [here]
    if sys.argv[1] == "relay":
        terminals = importlib.import_module(f"{PACKAGE}.terminals")
        sys.exit(terminals.run_relayed(int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:]))
    program = (sys.argv[3:] or ["keeper"])[0]
    sys.exit(importlib.import_module(f"{PACKAGE}.{program}").main(int(sys.argv[1]), int(sys.argv[2])))
