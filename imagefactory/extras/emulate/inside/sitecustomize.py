"""Wait for `import torch`. Every Python of an emulated run imports this file, because of PYTHONPATH.

It also runs the sitecustomize of the image, if there is one.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import os
import sys
from typing import Any

FOLDER = os.path.dirname(os.path.abspath(__file__))
ASKED = "IMAGEFACTORY_EMULATE"


class AfterTorch:
    """An import hook that finds torch as Python does, and installs the emulation after its import."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        for finder in sys.meta_path:
            find = getattr(finder, "find_spec", None)
            spec = find(name, path, target) if find else None
            if spec is not None:
                break
        else:
            return None
        execute = spec.loader.exec_module

        def and_then(module: Any) -> None:
            execute(module)
            importlib.import_module("imagefactory_emulate.start").install(module, os.environ[ASKED])

        spec.loader.exec_module = and_then
        return spec


def run_next() -> None:
    """Run the sitecustomize that this one hides."""
    others = [entry for entry in sys.path if os.path.abspath(entry or ".") != FOLDER]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", others)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


if os.environ.get(ASKED):
    sys.meta_path.insert(0, AfterTorch())
run_next()
