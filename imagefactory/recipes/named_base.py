"""What stands at `base` in a recipe: a name of bases.yaml, or an image and what is said beside it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from imagefactory.model import Base, Where
from imagefactory.recipes.bases import without_tag
from imagefactory.recipes.reader import Reader
from imagefactory.recipes.yaml_tree import YamlNode

BESIDE_IMAGE = ("glibc", "interpreter")


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedBase:
    """What stands at `base`: the name of a row of bases.yaml, or an image and what is said beside it."""

    name: str
    image: str = ""
    glibc: str = ""
    interpreter: str = ""
    where: Where | None = None

    def own(self, python: str) -> Base | None:
        """The base that the recipe describes itself, if it does."""
        if not self.image or self.where is None:
            return None
        return Base(
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


def read_base(reader: Reader, fields: Mapping[str, YamlNode]) -> NamedBase:
    """`base` with what stands beside it: a name, or a reference to an image with its glibc."""
    node = fields.get("base")
    beside = {key: fields[key] for key in BESIDE_IMAGE if key in fields}
    if node is None or node.kind != "text" or node.made or not re.search("[/:@]", node.text):
        for key, value in beside.items():
            reader.fault(
                value.where,
                "key-without-base",
                f"'{key}' requires a 'base' with an image digest",
                "remove it: bases.yaml has it for its bases",
            )
        return NamedBase(name=reader.text(node, "base", "base"))
    if "glibc" not in beside:
        reader.fault(
            node.where,
            "missing-key",
            "'glibc' is missing: no image is pulled to lock, so the recipe says which C library it carries",
            'write glibc: "2.36" next to it, as `ldd --version` prints inside the image',
        )
    image = reader.image(node, "base")
    glibc, interpreter = (reader.text(beside.get(key), key, key) for key in BESIDE_IMAGE)
    return NamedBase(
        name=_image_name(image), image=image, glibc=glibc, interpreter=interpreter, where=node.where
    )


def _image_name(image: str) -> str:
    """The name of a base that only a reference names: its last part and 12 digits of its digest."""
    place, _, digest = image.partition("@sha256:")
    last = place.rpartition("/")[2].partition(":")[0]
    return f"{re.sub('[^a-z0-9]+', '-', last)}-{digest[:12]}" if image else ""
