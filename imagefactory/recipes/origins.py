"""`index` of a recipe: which packages come from a package index of a name, and from no other."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from imagefactory.recipes.model import MatrixRow
from imagefactory.recipes.reader import Reader
from imagefactory.recipes.values import canonical, package_of
from imagefactory.recipes.yaml_tree import YamlNode, show


def read_origins(reader: Reader, node: YamlNode | None) -> tuple[tuple[str, str], ...]:
    """(normalised name, name of an index), as they are written."""
    found: dict[str, str] = {}
    for name, key, value in reader.pairs(node, "index"):
        if not reader.text(key, "index", "framework"):
            continue
        if canonical(name) in found:
            reader.fault(key.where, f"{show(name)} stands there twice", "remove one of them")
        found[canonical(name)] = reader.text(value, name, "index name")
    return tuple(found.items())


def with_origins(
    reader: Reader, root: YamlNode, kind: str, framework: str, matrix: Sequence[MatrixRow]
) -> list[MatrixRow]:
    """The rows of a recipe, each with the origins of what it asks for; what no row asks for is a fault."""
    asked = [_asked_of_pypi(row, kind, framework) for row in matrix]
    _refuse_unasked(reader, root.get("index"), frozenset().union(*asked), kind)
    nodes = rows.items if (rows := root.get("matrix")) and rows.kind == "list" else []
    for node, own in zip(nodes, asked, strict=False):
        _refuse_unasked(reader, node.get("index"), own, kind)
    return [
        replace(row, origins=tuple(sorted(pair for pair in row.origins if pair[0] in own)))
        for row, own in zip(matrix, asked, strict=True)
    ]


def _asked_of_pypi(row: MatrixRow, kind: str, framework: str) -> frozenset[str]:
    """What a row itself asks of PyPI by name; of a row that is built on a target all that may be."""
    own = () if kind == "conda" else row.packages
    return frozenset({*map(package_of, (*own, *row.pip)), *((framework,) if kind == "pypi" else ())})


def _refuse_unasked(reader: Reader, node: YamlNode | None, asked: Collection[str], kind: str) -> None:
    """No index of a name is asked for what packages need: uv asks it for what is asked by name alone."""
    for key, _ in node.pairs if node and node.kind == "map" else ():
        if key.kind == "text" and canonical(key.text) not in asked:
            reader.fault(
                key.where,
                f"{show(key.text)} is not asked for by name, so no index is asked for it",
                f"write it under '{'pip' if kind == 'conda' else 'packages'}' too, or take it out here",
            )
