"""Which third-party modules a project's own code imports, and whether an image can import them.

`modules` reads the code and runs none of it. The file also runs inside the image, by the standard library
only: `python imported.py DIRECTORY` prints a JSON object with `imports`, `fails` and `absent`.

A module counts if a file imports it unconditionally: outside of `try`, `if` and functions. A module that no
installed package has is `absent`: the project's file does not ask for it.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import importlib.util
import io
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

OTHERS = {
    "test",
    "tests",
    "testing",
    "example",
    "examples",
    "benchmark",
    "benchmarks",
    "docs",
    "doc",
    "build",
}
"""Directories whose code is not the program itself."""
SCRIPTS = {"setup", "conftest", "hubconf"}
BROUGHT_ALONG = {"pkg_resources", "setuptools", "distutils", "imp", "asyncore", "asynchat", "cgi", "pipes"}
"""Modules that Python or its environments once had: few files ask for them, so their absence is a failure."""


def modules(root: Path) -> list[str]:
    """Return the top-level third-party modules that the project's code imports, sorted."""
    found: set[str] = set()
    for path in sorted(_files(root)):
        try:
            tree = ast.parse(path.read_bytes())
        except (SyntaxError, ValueError):  # a template, or Python 2
            continue
        own = {one.stem for folder in (path.parent, root, root / "src") for one in folder.glob("*")}
        found.update(name for name in _imports(tree) if name not in own)
    return sorted((found - set(sys.stdlib_module_names)) | (found & BROUGHT_ALONG))


def _files(root: Path) -> Iterator[Path]:
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name.lower() not in OTHERS and not name.startswith(".")]
        for name in names:
            path = Path(folder, name)
            if path.suffix == ".py" and path.stem not in SCRIPTS and not name.startswith("test_"):
                yield path


def _imports(tree: ast.Module) -> Iterator[str]:
    for node in tree.body:
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
            yield node.module.partition(".")[0]


def try_imports(names: list[str]) -> dict[str, dict[str, str] | list[str]]:
    """Import each module in this process, as a program does. A crash leaves no result."""
    imports: list[str] = []
    absent: list[str] = []
    fails: dict[str, str] = {}
    for name in names:
        print(name, file=sys.stderr, flush=True)  # the last line names the module that ends the process
        try:
            if importlib.util.find_spec(name) is None and name not in BROUGHT_ALONG:
                absent.append(name)
                continue
            with contextlib.redirect_stdout(io.StringIO()):
                importlib.import_module(name)
        except BaseException as error:  # a module may also call sys.exit
            fails[name] = f"{type(error).__name__}: {error}"[:300]
        else:
            imports.append(name)
    return {"imports": imports, "fails": fails, "absent": absent}


if __name__ == "__main__":
    print(json.dumps(try_imports(modules(Path(sys.argv[1])))), flush=True)
    os._exit(0)  # threads that a module started do not matter
