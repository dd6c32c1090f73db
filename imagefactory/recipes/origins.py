"""Which packages of a recipe come from elsewhere than the machine's package index.

`index` names the index of a package, which then comes from no other; a wheel of the factory stands under
`packages` or `pip` by its path, and becomes its exact version here, with the path as where it comes from.
Folders and repositories that have no wheel yet are set apart.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest

from packaging.utils import parse_wheel_filename

from imagefactory.errors import Diagnostic
from imagefactory.model import Target, Where
from imagefactory.recipes.family import MatrixRow
from imagefactory.recipes.reader import Reader
from imagefactory.recipes.values import canonical, is_source, package_of
from imagefactory.recipes.yaml_tree import YamlNode, show


def read_origins(reader: Reader, node: YamlNode | None) -> tuple[tuple[str, str], ...]:
    """(normalised name, name of an index), as they are written."""
    found: dict[str, str] = {}
    for name, key, value in reader.pairs(node, "index"):
        if not reader.text(key, "index", "framework"):
            continue
        if canonical(name) in found:
            reader.fault(key.where, "duplicate-key", f"duplicate {show(name)}", "remove one of them")
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
    made = []
    for row, own, node in zip_longest(matrix, asked, nodes[: len(matrix)]):
        named = {name: index for name, index in row.origins if name in own}
        files = _files(reader, [section for section in (node, root) if section], row, named)
        made.append(
            replace(
                row,
                packages=tuple(dict.fromkeys(map(_exact, _without_sources(row.packages)))),
                pip=tuple(dict.fromkeys(map(_exact, _without_sources(row.pip)))),
                sources=tuple(_sources(row)),
                origins=tuple(sorted((named | files).items())),
            )
        )
    return made


def origin_faults(row: MatrixRow, under: Target) -> Iterator[Diagnostic]:
    """What is not PyPI's where the target below is of conda, whose `packages` are its channels'."""
    pip = set(map(package_of, row.pip))
    for key, text in row.sources if under.source == "conda" else ():
        if key == "packages":
            what = f"{show(text)} under 'packages' is not in the channels of {under.name}"
            yield Diagnostic("not-a-channel-package", str(row.where), what, "write it under 'pip'")
    for name, _ in row.origins if under.source == "conda" else ():
        if name not in pip:
            what = (
                f"'{name}' under 'packages' must come from the channels of {under.name}, not "
                "from an index or a file"
            )
            yield Diagnostic("not-a-channel-package", str(row.where), what, "write it under 'pip'")


def _sources(row: MatrixRow) -> Iterator[tuple[str, str]]:
    for key, texts in (("packages", row.packages), ("pip", row.pip)):
        yield from ((key, text) for text in dict.fromkeys(texts) if is_source(text))


def _without_sources(texts: Iterable[str]) -> list[str]:
    return [text for text in texts if not is_source(text)]


def _files(
    reader: Reader, sections: Sequence[YamlNode], row: MatrixRow, named: Mapping[str, str]
) -> dict[str, str]:
    """The wheels of the factory that a row names, by package."""
    found: dict[str, str] = {}
    for text in (one for one in (*row.packages, *row.pip) if one.startswith("./") and not is_source(one)):
        name = package_of(text)
        if name in named or name in found:
            where = _item(sections, text) or row.where
            other = found.get(name) or f"the index '{named[name]}'"
            reader.fault(
                where, "origin-conflict", f"'{name}' already comes from {other}", "take it from one of them"
            )
        found[name] = text
    return found


def _item(sections: Sequence[YamlNode], text: str) -> Where | None:
    lists = (node for section in sections for key in ("packages", "pip") if (node := section.get(key)))
    return next((item.where for node in lists for item in node.items if item.text == text), None)


def _exact(text: str) -> str:
    """A requirement; of a wheel's path the version that it holds."""
    if not text.startswith("./"):
        return text
    _, version, *_ = parse_wheel_filename(text.rpartition("/")[2])
    return f"{package_of(text)}=={version}"


def _asked_of_pypi(row: MatrixRow, kind: str, framework: str) -> frozenset[str]:
    """What a row itself asks of PyPI by name; of a row that is built on a target all that may be."""
    own = _without_sources((*(() if kind == "conda" else row.packages), *row.pip))
    return frozenset({*map(package_of, own), *((framework,) if kind == "pypi" else ())})


def _refuse_unasked(reader: Reader, node: YamlNode | None, asked: Collection[str], kind: str) -> None:
    """No index of a name is asked for what packages need: uv asks it for what is asked by name alone."""
    for key, _ in node.pairs if node and node.kind == "map" else ():
        if key.kind == "text" and canonical(key.text) not in asked:
            reader.fault(
                key.where,
                "index-unused",
                f"{show(key.text)} is not listed by name, so its index is never used",
                f"write it under '{'pip' if kind == 'conda' else 'packages'}' too, or remove it here",
            )
