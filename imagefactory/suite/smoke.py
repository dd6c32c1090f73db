"""Start the suite inside an image: python -I -B smoke.py EXPECTATIONS REPORT.

The directory becomes the package `imagefactory_suite` without a change of the module search path, so none of
its names can hide a module of the image.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import os
import sys

PACKAGE = "imagefactory_suite"


def load_suite(folder: str) -> None:
    """Make `folder` importable as the package `imagefactory_suite`."""
    spec = importlib.machinery.ModuleSpec(PACKAGE, None, is_package=True)
    spec.submodule_search_locations = [folder]
    sys.modules[PACKAGE] = importlib.util.module_from_spec(spec)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: python -I -B smoke.py EXPECTATIONS REPORT")
    load_suite(os.path.dirname(os.path.abspath(__file__)))
    suite = importlib.import_module(f"{PACKAGE}.suite")
    sys.exit(suite.main(sys.argv[1], sys.argv[2]))
