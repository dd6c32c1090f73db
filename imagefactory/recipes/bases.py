"""YAML -> BaseSpec: the rows of bases.yaml, and the bases that recipes describe by digest."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from imagefactory.errors import Diagnostic, RecipeError
from imagefactory.model import BaseSpec, SourceLocation
from imagefactory.recipes.family import Recipe
from imagefactory.recipes.values import NodeReader
from imagefactory.recipes.yaml_tree import YamlNode, parse_tree

BASES_FILE = "bases.yaml"


_BASE_REQUIRED = {
    "name": "name: debian-12",
    "suite": "suite: bookworm",
    "glibc": 'glibc: "2.36"',
    "packages": "packages: [python3]",
    "public": "public: docker.io/library/debian:12-slim",
}
_IMAGE_REQUIRED = {
    "name": "name: cuda-devel",
    "image": "image: docker.io/nvidia/cuda@sha256:... with its 64 hex digits",
    "glibc": 'glibc: "2.36" (`ldd --version` inside the image says it)',
}


def parse_bases(text: str, file: str) -> tuple[BaseSpec, ...]:
    """Return the bases in the text of bases.yaml, in its order. Raises RecipeError with all problems."""
    reader = NodeReader(file)
    fields = reader.mapping(parse_tree(text, file), ("bases",), {"bases": "bases: and its rows"})
    bases: list[BaseSpec] = []
    for node in reader.items(fields.get("bases"), "bases", "rows, each starting with - name:"):
        base = _base(reader, node)
        for other in bases:
            if base.name and other.name == base.name:
                message = f"base '{base.name}' is also at {other.where}"
                reader.fault(node.where, "duplicate-base", message, "remove one of them")
        bases.append(base)
    reader.finish()
    return tuple(bases)


def _base(reader: NodeReader, node: YamlNode) -> BaseSpec:
    """Return a row of bases.yaml: built from Debian packages, or with `image` pulled by digest."""
    pulled = node.kind == "map" and any(key.text == "image" for key, _ in node.pairs)
    required = _IMAGE_REQUIRED if pulled else _BASE_REQUIRED
    keys = (*required, "python", "interpreter") if pulled else (*required, "python")
    row = reader.mapping(node, keys, required)
    image = reader.image(row.get("image"), "image")
    return BaseSpec(
        name=reader.text(row.get("name"), "name", "base"),
        suite=reader.text(row.get("suite"), "suite", "suite"),
        python=reader.text(row.get("python"), "python", "python"),
        glibc=reader.text(row.get("glibc"), "glibc", "glibc"),
        packages=reader.texts(row.get("packages"), "packages", "debian package", empty=False),
        public=without_tag(image) or reader.text(row.get("public"), "public", "public"),
        where=node.where,
        image=image,
        interpreter=reader.text(row.get("interpreter"), "interpreter", "interpreter"),
    )


def all_bases(bases: Sequence[BaseSpec], recipes: Iterable[Recipe]) -> tuple[BaseSpec, ...]:
    """Return `bases` and those that recipes describe by digest, each once.

    Raises RecipeError for one image that is described in two ways.
    """
    by_name = {base.name: base for base in bases}
    faults = []
    for base in (row.own_base for recipe in recipes for row in recipe.matrix):
        if base is None:
            continue
        other = by_name.setdefault(base.name, base)
        if not other.python:
            by_name[base.name] = base
        if _described(other, base) != _described(base, other):
            message = f"base '{base.name}' is described differently at {other.where}"
            write = "write the same glibc, interpreter and python, or give each its own name in bases.yaml"
            faults.append(Diagnostic("base-described-twice", str(base.where), message, write))
    if faults:
        raise RecipeError(dict.fromkeys(faults))
    return tuple(by_name.values())


def _described(base: BaseSpec, other: BaseSpec) -> tuple[str, ...]:
    """Return the values that must be equal: all but the image's tag, and a Python that one of them omits."""
    python = (base.python, base.python_path) if base.python and other.python else ()
    return base.public, base.glibc, *python


def without_tag(image: str) -> str:
    """Return a reference without a tag, as some tools reject a tag with a digest."""
    reference, separator, digest = image.partition("@")
    host, slash, path = reference.partition("/")
    return f"{host}{slash}{path.partition(':')[0]}{separator}{digest}"


BASE_ONLY_KEYS = ("glibc", "interpreter")


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseName:
    """The value of `base`: the name of a row of bases.yaml, or an image and the keys next to it."""

    name: str
    image: str = ""
    glibc: str = ""
    interpreter: str = ""
    where: SourceLocation | None = None

    def own(self, python: str) -> BaseSpec | None:
        """Return the base that the recipe itself describes, None for a name."""
        if not self.image or self.where is None:
            return None
        return BaseSpec(
            name=self.name,
            suite="",
            python=python,
            glibc=self.glibc,
            packages=(),
            public=without_tag(self.image),
            where=self.where,
            image=self.image,
            interpreter=self.interpreter,
        )


def read_base(reader: NodeReader, fields: Mapping[str, YamlNode]) -> BaseName:
    """Return `base` with the keys next to it: a name, or a reference to an image with its glibc."""
    node = fields.get("base")
    beside = {key: fields[key] for key in BASE_ONLY_KEYS if key in fields}
    if node is None or node.kind != "text" or node.made or not re.search("[/:@]", node.text):
        for key, value in beside.items():
            message = f"'{key}' requires a 'base' with an image digest"
            reader.fault(value.where, "key-without-base", message, f"remove it, or set '{key}' in bases.yaml")
        return BaseName(name=reader.text(node, "base", "base"))
    if "glibc" not in beside:
        message = "'glibc' is missing: a base by digest needs the version of its C library"
        write = 'write glibc: "2.36", the version that `ldd --version` prints in the image'
        reader.fault(node.where, "missing-key", message, write)
    image = reader.image(node, "base")
    glibc, interpreter = (reader.text(beside.get(key), key, key) for key in BASE_ONLY_KEYS)
    reference, _, digest = image.partition("@sha256:")
    last = re.sub("[^a-z0-9]+", "-", reference.rpartition("/")[2].partition(":")[0])
    name = f"{last}-{digest[:12]}" if image else ""
    return BaseName(name=name, image=image, glibc=glibc, interpreter=interpreter, where=node.where)
