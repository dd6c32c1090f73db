"""Run the GPU suite of this kit inside its image: python3 run.py [--runner NAME] [--image IMAGE]

It needs Python 3.9, a GPU, and docker, podman or apptainer. It does not need imagefactory or, if the image is
on this machine, the network. Copy the directory back to the machine that created it: `imagefactory sweep
collect DIR` signs the result.

The directory `kit` becomes a package without a change of Python's module path.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import os
import sys
from pathlib import Path

PACKAGE = "imagefactory_kit"
HERE = Path(__file__).resolve().parent

if __name__ == "__main__":
    spec = importlib.machinery.ModuleSpec(PACKAGE, None, is_package=True)
    spec.submodule_search_locations = [str(HERE / "kit")]
    sys.modules[PACKAGE] = importlib.util.module_from_spec(spec)
    sys.exit(importlib.import_module(f"{PACKAGE}.program").main(sys.argv[1:], os.environ, HERE))
