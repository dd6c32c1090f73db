"""What a recipe says of its images' config: variables, labels, own files, and how a container starts."""

from __future__ import annotations

from collections.abc import Mapping

from packaging.licenses import InvalidLicenseExpression, canonicalize_license_expression

from imagefactory.model import FilesWanted, Start
from imagefactory.recipes.reader import Reader
from imagefactory.recipes.values import OWNED_LABELS, OWNED_PREFIX, OWNED_VARIABLES
from imagefactory.recipes.yaml_tree import YamlNode

START_KEYS = ("workdir", "user", "entrypoint", "command")


def read_environment(reader: Reader, node: YamlNode | None) -> tuple[tuple[str, str], ...]:
    values = {}
    for name, key, value in reader.pairs(node, "environment"):
        if not reader.text(key, "environment", "variable"):
            continue
        if name in OWNED_VARIABLES or name.startswith(OWNED_PREFIX):
            reader.fault(
                key.where, "name-reserved", f"'{name}' is set by imagefactory in every image", "remove it"
            )
        values[name] = reader.text(value, name, "value")
    return tuple(values.items())


def read_labels(reader: Reader, node: YamlNode | None) -> tuple[tuple[str, str], ...]:
    values = {}
    for name, key, value in reader.pairs(node, "labels"):
        if not reader.text(key, "labels", "label"):
            continue
        if OWNED_LABELS.fullmatch(name):
            reader.fault(
                key.where, "name-reserved", f"'{name}' is set by imagefactory in every image", "remove it"
            )
        values[name] = reader.text(value, name, "label value")
        if name == "org.opencontainers.image.licenses" and values[name]:
            try:
                canonicalize_license_expression(values[name])
            except InvalidLicenseExpression as error:
                write = 'write an SPDX expression, such as "BSD-3-Clause AND LicenseRef-NVIDIA-Proprietary"'
                reader.fault(value.where, "value-invalid", str(error), write)
    return tuple(values.items())


def read_files(reader: Reader, node: YamlNode | None) -> tuple[FilesWanted, ...]:
    found = []
    for folder, key, value in reader.pairs(node, "files"):
        reader.text(key, "files", "folder")
        patterns = reader.texts(value, folder, "pattern", empty=False)
        found += [
            FilesWanted(folder=folder, pattern=item.text, where=item.where)
            for item in value.items
            if item.text in patterns
        ]
    return tuple(found)


def read_start(reader: Reader, fields: Mapping[str, YamlNode]) -> Start:
    """How a container starts, as far as it is written. A word may stand in a command twice."""

    def words(key: str) -> tuple[str, ...]:
        items = reader.items(fields.get(key), key, f"{key}: [python, train.py]")
        return tuple(reader.text(item, key, "argument") for item in items)

    return Start(
        entrypoint=words("entrypoint"),
        command=words("command"),
        workdir=reader.text(fields.get("workdir"), "workdir", "workdir"),
        user=reader.text(fields.get("user"), "user", "user"),
    )
