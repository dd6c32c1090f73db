"""YAML -> Recipe; every fault says file:line:column, what is wrong and what to write.

Recipes are data from strangers: yaml_tree.py reads the text within caps and keeps the place of every
value, and here each value passes an allow-list by full match. All faults of a file are told at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from imagefactory.model import NO_CUDA, Where
from imagefactory.recipes.cpu_rows import check_cpu_row, check_gpu_row
from imagefactory.recipes.image_config import (
    START_KEYS,
    read_environment,
    read_files,
    read_labels,
    read_start,
)
from imagefactory.recipes.match_spec import channel_address
from imagefactory.recipes.family import MatrixRow, Recipe
from imagefactory.recipes.named_base import BESIDE_IMAGE, NamedBase, read_base
from imagefactory.recipes.origins import read_origins, with_origins
from imagefactory.recipes.reader import Reader
from imagefactory.recipes.rocm_rows import CUDA_CHECK, check_processors, check_rocm_row, in_order
from imagefactory.recipes.values import (
    GPU_CHECKS,
    REQUIREMENT_RULES,
    SMOKE_CHECKS,
    SOURCES,
    WAIVABLE,
    Source,
    canonical,
    check_fault,
    default_checks,
    normal_requirement,
    requirement_fault,
)
from imagefactory.recipes.yaml_tree import YamlNode, parse_tree

# Key -> an example of the line, told when it is missing.
_FAMILY_REQUIRED = {
    "family": "family: pytorch",
    "description": "description: what the image is for",
    "source": "source: pypi",
    "framework": "framework: torch",
    "platform": "platform: linux/amd64",
    "base": "base: debian-12",
    "python": 'python: "3.11"',
    "matrix": "matrix: and its rows",
}
_CHANNELS = {"channels": "channels: [conda-forge]"}
_ON = {"on": "on: pytorch-2.3-cu121"}
_ROW_REQUIRED = {"version": 'version: "2.3"', "cuda": 'cuda: ["12.1"]'}
_VIRTUAL = ("cuda", "glibc", "archspec")
_OF_CONDA = ("channels", "channel-priority", "virtual", "pip")
_OVERRIDABLE = (
    *("capabilities", "checks", "waive", "packages", "constraints", "environment", "index", "exclude"),
    *_OF_CONDA,
)
_OF_FAMILIES = ("labels", "system", "files", *START_KEYS)
_FAMILY_KEYS = (*_FAMILY_REQUIRED, "on", *_OF_FAMILIES, *BESIDE_IMAGE, *_OVERRIDABLE)
_OWN = ("framework", "description", "labels", "extras", "python", "base")
_ROW_KEYS = (*_ROW_REQUIRED, "rocm", "on", *_OWN, *BESIDE_IMAGE, "platforms", *_OVERRIDABLE)
# What is built on a target says these alone; all else is that target's.
_BESIDE_ON = ("family", "description", "matrix", "on", "pip", *_OF_FAMILIES, *_OVERRIDABLE[:8])


# --- parsing -------------------------------------------------------------------------------------


def parse_recipe(text: str, file: str) -> Recipe:
    """One family from the text of its YAML file; `file` is how errors name it.

    What needs other files (the base, the target that it is built on, what the source offers) is judged
    by `expand`. Raises RecipeError with all faults of the file.
    """
    reader = Reader(file)
    root = parse_tree(text, file)
    kind = _kind(root)
    fields = reader.mapping(root, _FAMILY_KEYS, _family_required(kind, on="on" in root.keys))
    _refuse_misplaced(reader, root, kind)
    texts = {
        key: reader.text(fields.get(key), key, key)
        for key in _FAMILY_REQUIRED
        if key not in ("base", "matrix") and (kind != "on" or key in _BESIDE_ON)
    }
    labels = read_labels(reader, fields.get("labels"))
    system = reader.texts(fields.get("system"), "system", "debian package", empty=False)
    files, start = read_files(reader, fields.get("files")), read_start(reader, fields)
    framework = _framework(kind, texts.get("framework", ""))
    family = _Family(
        texts=texts,
        base=NamedBase(name="") if kind == "on" else read_base(reader, fields),
        common=_common(reader, fields, kind),
        kind=kind,
        framework=framework,
    )
    if kind == "on" and "on" in fields:
        matrix = [_row_on(reader, fields, family, root)]
    else:
        rows = reader.items(fields.get("matrix"), "matrix", "rows, each starting with - version:")
        make_row = _row_on if kind == "on" else _row
        matrix = [make_row(reader, fields, family, row) for row in rows]
        own = [(framework, family.common.channels), *((row.framework, row.channels) for row in matrix)]
        for section, (named, channels) in zip((root, *rows), own, strict=True):
            _check_fit(reader, section, Source(kind=kind, framework=named, channels=channels))
    matrix = with_origins(reader, root, kind, framework, matrix)
    reader.finish()
    return Recipe(
        family=texts["family"],
        description=texts["description"],
        source=texts.get("source", ""),
        framework=framework,
        python=texts.get("python", ""),
        base=family.base.name,
        platform=texts.get("platform", ""),
        matrix=tuple(matrix),
        where=root.where,
        labels=labels,
        files=files,
        start=start,
        system=system,
    )


def _kind(root: YamlNode) -> str:
    """`pypi`, `conda`, or `on` for a family that is built on targets; empty where the text says none."""
    source = root.get("source")
    rows = root.get("matrix")
    if "on" in root.keys or (source is None and rows and any("on" in row.keys for row in rows.items)):
        return "on"
    return source.text if source and source.text in SOURCES else ""


def _family_required(kind: str, *, on: bool) -> Mapping[str, str]:
    if kind == "on":
        wanted = {key: _FAMILY_REQUIRED[key] for key in ("family", "description")}
        return wanted | ({} if on else {"matrix": "matrix: and its rows, each with - on:"})
    return _FAMILY_REQUIRED | (_CHANNELS if kind == "conda" else {})


def _framework(kind: str, name: str) -> str:
    """The framework's name in its source's normal form."""
    return name.lower() if kind == "conda" else canonical(name)


def _refuse_misplaced(reader: Reader, section: YamlNode, kind: str) -> None:
    """Keys that exist, but not beside this source."""
    for key, value in section.pairs if section.kind == "map" else ():
        name = key.text
        if kind == "on" and name in {*_FAMILY_KEYS, *_ROW_KEYS} - {*_BESIDE_ON}:
            reader.fault(
                key.where, "key-not-with-on", f"'{name}' comes from the target that 'on' names", "remove it"
            )
        elif kind == "on" and name == "matrix" and "on" in section.keys:
            reader.fault(
                key.where,
                "key-not-with-on",
                "'matrix' and 'on' cannot both be in a family",
                "remove one of them",
            )
        elif kind == "pypi" and name in _OF_CONDA:
            write = "write these under 'packages'" if name == "pip" else "remove it, or write source: conda"
            reader.fault(key.where, "key-not-for-source", f"'{name}' requires source: conda", write)
        elif kind == "conda" and name == "rocm":
            reader.fault(
                key.where,
                "key-not-for-source",
                "'rocm' requires source: pypi",
                "remove it: conda rows are for CUDA or CPUs",
            )
        elif kind == "conda" and name == "extras" and value.kind == "list":
            reader.fault(
                key.where,
                "key-not-for-source",
                "'extras' requires source: pypi, because conda packages have none",
                "remove it, and choose a build with a constraint such as 'jaxlib * *cuda12*'",
            )
        elif kind != "on" and name == "on":
            reader.fault(
                key.where,
                "on-with-source",
                "'on' cannot be in a family that has a source",
                "create a separate family with 'on' instead of 'source'",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Family:
    """The family's values that rows fall back on: its texts by key, its base, and its lists."""

    texts: Mapping[str, str]
    base: NamedBase
    common: _Common
    kind: str
    framework: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Common:
    """What a family and a row can both say."""

    capabilities: tuple[str, ...]
    checks: tuple[str, ...]
    waive: tuple[str, ...]
    packages: tuple[str, ...]
    constraints: tuple[str, ...]
    environment: tuple[tuple[str, str], ...]
    channels: tuple[str, ...]
    priority: str
    virtual: tuple[tuple[str, str], ...]
    pip: tuple[str, ...]
    origins: tuple[tuple[str, str], ...]
    exclude: tuple[str, ...]


def _common(reader: Reader, fields: Mapping[str, YamlNode], kind: str) -> _Common:
    def requirements(key: str, rule: str, kept: str = kind) -> tuple[str, ...]:
        return tuple(normal_requirement(text, kept) for text in reader.texts(fields.get(key), key, rule))

    package, constraint = REQUIREMENT_RULES.get(kind, ("added package", "added package"))
    capabilities = reader.texts(fields.get("capabilities"), "capabilities", "capability", empty=False)
    checks = reader.texts(fields.get("checks"), "checks", "check", empty=False)
    waived = reader.texts(fields.get("waive"), "waive", "waived")
    channels = reader.texts(fields.get("channels"), "channels", "channel", empty=False)
    return _Common(
        capabilities=in_order(capabilities),
        checks=tuple(check for check in SMOKE_CHECKS if check in checks),
        waive=tuple(check for check in WAIVABLE if check in waived),
        packages=requirements("packages", package),
        constraints=requirements("constraints", constraint),
        environment=read_environment(reader, fields.get("environment")),
        channels=tuple(dict.fromkeys(map(channel_address, channels))),
        priority=reader.text(fields.get("channel-priority"), "channel-priority", "channel-priority"),
        virtual=_virtual(reader, fields.get("virtual")),
        pip=requirements("pip", "package", "pypi"),
        origins=read_origins(reader, fields.get("index")),
        exclude=tuple(map(canonical, reader.texts(fields.get("exclude"), "exclude", "excluded package"))),
    )


def _virtual(reader: Reader, node: YamlNode | None) -> tuple[tuple[str, str], ...]:
    """What the packages may count on of the machine, as far as it is written."""
    found = reader.mapping(node, _VIRTUAL, {}) if node else {}
    rules = {"cuda": "driver", "glibc": "glibc", "archspec": "archspec"}
    return tuple((key, reader.text(found[key], key, rules[key])) for key in _VIRTUAL if key in found)


def _row(reader: Reader, fields: Mapping[str, YamlNode], family: _Family, node: YamlNode) -> MatrixRow:
    """One row of the matrix, completed by the family's values (added to packages, constraints and pip)."""
    in_place = {"version": _ROW_REQUIRED["version"]} if "rocm" in node.keys else _ROW_REQUIRED
    row = reader.mapping(node, _ROW_KEYS, in_place)
    _refuse_misplaced(reader, node, family.kind)
    own, common = _common(reader, row, family.kind), family.common
    cudas = reader.texts(row.get("cuda"), "cuda", "cuda", empty=False)
    rocms = reader.texts(row.get("rocm"), "rocm", "rocm", empty=False)
    gpu = "rocm" in row or NO_CUDA not in cudas
    if "rocm" in row:
        check_rocm_row(reader, node, row, fields)
    elif gpu:
        check_gpu_row(reader, node, row, fields)
    else:
        check_cpu_row(reader, row)
    if gpu:
        check_processors(reader, row.get("capabilities") or fields.get("capabilities"), rocm="rocm" in row)
    framework = _framework(family.kind, reader.text(row.get("framework"), "framework", "framework"))
    framework = framework or family.framework
    checks = own.checks or common.checks or default_checks(framework)
    without = (CUDA_CHECK,) if rocms else () if gpu else GPU_CHECKS
    counted_on = dict(common.virtual) | dict(own.virtual)
    keys = ("base", "python", "extras", "system", "framework")
    places = {key: found.where for key in keys if (found := row.get(key) or fields.get(key))}
    for virtual in (fields.get("virtual"), row.get("virtual")):
        places |= {f"virtual.{key.text}": value.where for key, value in (virtual.pairs if virtual else ())}
    for key in ("cuda", "rocm"):
        places |= {f"{key}.{n}": item.where for n, item in enumerate(row[key].items if key in row else ())}
    places |= _requirement_places(fields, row)
    platforms = reader.texts(row.get("platforms"), "platforms", "platform", empty=False)
    written = read_base(reader, row)
    python = reader.text(row.get("python"), "python", "python") or family.texts["python"]
    base, carried = (written, python) if "base" in row else (family.base, family.texts["python"])
    return MatrixRow(
        version=reader.text(row.get("version"), "version", "version"),
        cuda=() if rocms else cudas,
        rocm=rocms,
        extras=tuple(canonical(extra) for extra in reader.texts(row.get("extras"), "extras", "extra")),
        python=python,
        base=base.name,
        platforms=platforms or (family.texts["platform"],),
        capabilities=(own if "capabilities" in row else common).capabilities if gpu else (),
        checks=tuple(check for check in checks if check not in without),
        packages=tuple(dict.fromkeys((*common.packages, *own.packages))),
        constraints=tuple(dict.fromkeys((*common.constraints, *own.constraints))),
        environment=(own if "environment" in row else common).environment,
        where=node.where,
        framework=framework,
        description=reader.text(row.get("description"), "description", "description"),
        labels=read_labels(reader, row.get("labels")),
        # Which Python an image carries is nothing to an environment that brings its own.
        own_base=base.own("" if family.kind == "conda" else carried),
        places=tuple(places.items()),
        channels=own.channels or common.channels,
        priority=own.priority or common.priority or "strict",
        virtual=tuple(pair for pair in counted_on.items() if gpu or pair[0] != "cuda"),
        pip=tuple(dict.fromkeys((*common.pip, *own.pip))),
        waive=(own if "waive" in row else common).waive if gpu else (),
        origins=tuple((dict(common.origins) | dict(own.origins)).items()),
        exclude=tuple(dict.fromkeys((*common.exclude, *own.exclude))),
    )


def _row_on(reader: Reader, fields: Mapping[str, YamlNode], family: _Family, node: YamlNode) -> MatrixRow:
    """What a family, or one of its rows, adds to another target. Only `expand` knows what fits there."""
    itself = family.common if "on" in fields else None
    row = fields if itself else reader.mapping(node, _ROW_KEYS, _ON)
    if not itself:
        _refuse_misplaced(reader, node, "on")
    own, common = itself or _common(reader, row, "on"), family.common
    sections = (("on", row), ("system", fields))
    places = {key: section[key].where for key, section in sections if key in section}
    places |= _requirement_places(fields, row)
    for section in (fields, row):
        checks = section["checks"].items if "checks" in section else ()
        places |= {f"checks.{item.text}": item.where for item in checks}
    return MatrixRow(
        version="",
        cuda=(),
        extras=(),
        python="",
        base="",
        platforms=(),
        capabilities=(own if "capabilities" in row else common).capabilities,
        checks=own.checks or common.checks,
        packages=tuple(dict.fromkeys((*common.packages, *own.packages))),
        constraints=tuple(dict.fromkeys((*common.constraints, *own.constraints))),
        environment=(own if "environment" in row else common).environment,
        where=node.where,
        description=reader.text(row.get("description"), "description", "description"),
        labels=read_labels(reader, row.get("labels")),
        places=tuple(places.items()),
        pip=tuple(dict.fromkeys((*common.pip, *own.pip))),
        on=reader.text(row.get("on"), "on", "on"),
        waive=(own if "waive" in row else common).waive,
        origins=tuple((dict(common.origins) | dict(own.origins)).items()),
        exclude=tuple(dict.fromkeys((*common.exclude, *own.exclude))),
    )


def _requirement_places(*sections: Mapping[str, YamlNode]) -> dict[str, Where]:
    """Return where each requirement of a row is written first, `packages.0` in the family or the row."""
    places: dict[str, Where] = {}
    for key in ("packages", "constraints", "pip", "exclude"):
        found: dict[str, Where] = {}
        for section in sections:
            for item in section[key].items if key in section else ():
                found.setdefault(item.text, item.where)
        places |= {f"{key}.{index}": where for index, where in enumerate(found.values())}
    return places


def _check_fit(reader: Reader, node: YamlNode, source: Source) -> None:
    """Faults that only source and framework show; what is built `on` a target waits for `expand`."""
    for key, value in node.pairs if source.kind in SOURCES else ():
        for item in value.items:
            fault = None
            if key.text in ("packages", "constraints") and item.kind == "text":
                fault = requirement_fault(item.text, key.text, source)
            elif key.text == "checks":
                fault = check_fault(item.text, source.framework)
            if fault:
                reader.fault(item.where, *fault)
