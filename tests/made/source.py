"""The source of imagefactory/, for tests that read it: each process parses and walks a file once."""

from __future__ import annotations

import ast
import functools
from pathlib import Path

HOUSE = Path(__file__).parents[2] / "imagefactory"
FILES = tuple(sorted(HOUSE.rglob("*.py")))


@functools.cache
def parse(path: Path) -> ast.Module:
    """Return the syntax tree of a file."""
    return ast.parse(path.read_text(encoding="utf-8"))


@functools.cache
def nodes(path: Path) -> tuple[ast.AST, ...]:
    """Return all nodes of a file."""
    return tuple(ast.walk(parse(path)))


@functools.cache
def calls(path: Path) -> tuple[tuple[ast.Call, str], ...]:
    """Return each call in a file with the text of what it calls: `subprocess.run`."""
    return tuple((node, ast.unparse(node.func)) for node in nodes(path) if isinstance(node, ast.Call))
