"""Read recipes from YAML. Each problem has file:line:column, the cause and a fix.

Recipes are untrusted data. yaml_tree.py reads the text within limits and keeps the location of every value,
and each value must fully match an allow-list. All problems of a file are reported at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from packaging.licenses import InvalidLicenseExpression, canonicalize_license_expression

from imagefactory.gpu import knowledge
from imagefactory.gpu.capability import Capability, parse_capability
from imagefactory.model import NO_CUDA, ContainerStart, FilesSpec, FrozenSpec, SourceLocation
from imagefactory.recipes.bases import BASE_ONLY_KEYS, BaseName, read_base
from imagefactory.recipes.expand import read_origins, with_origins
from imagefactory.recipes.family import Recipe, RecipeRow
from imagefactory.recipes.values import (
    GPU_CHECKS,
    REQUIREMENT_RULES,
    RESERVED_LABELS,
    RESERVED_PREFIX,
    RESERVED_VARIABLES,
    RULES,
    SMOKE_CHECKS,
    SOURCES,
    WAIVABLE,
    NodeReader,
    RequirementContext,
    canonical,
    channel_address,
    check_name_problem,
    default_checks,
    normal_requirement,
    requirement_problem,
)
from imagefactory.recipes.yaml_tree import YamlNode, parse_tree
from imagefactory.versions import natural

# --- The config of an image: variables, labels, own files, and how a container starts

START_KEYS = ("workdir", "user", "entrypoint", "command")


def read_environment(reader: NodeReader, node: YamlNode | None) -> tuple[tuple[str, str], ...]:
    def reserved(name: str) -> bool:
        return name in RESERVED_VARIABLES or name.startswith(RESERVED_PREFIX)

    settings = _read_settings(reader, node, ("environment", "variable", "value"), reserved)
    return tuple((name, value) for name, value, _ in settings)


def read_labels(reader: NodeReader, node: YamlNode | None) -> tuple[tuple[str, str], ...]:
    values = {}
    rules = ("labels", "label", "label value")
    for name, value, location in _read_settings(
        reader, node, rules, lambda n: bool(RESERVED_LABELS.fullmatch(n))
    ):
        values[name] = value
        if name == "org.opencontainers.image.licenses" and value:
            try:
                canonicalize_license_expression(value)
            except InvalidLicenseExpression as error:
                write = 'write an SPDX expression, such as "BSD-3-Clause AND LicenseRef-NVIDIA-Proprietary"'
                reader.fault(location, "value-invalid", str(error), write)
    return tuple(values.items())


def _read_settings(
    reader: NodeReader, node: YamlNode | None, rules: tuple[str, str, str], reserved: Callable[[str], bool]
) -> Iterator[tuple[str, str, SourceLocation]]:
    """Yield name, value and location. `rules` are the section, and the rules for name and value."""
    section, name_rule, value_rule = rules
    for name, key, value in reader.pairs(node, section):
        if reader.text(key, section, name_rule):
            if reserved(name):
                message = f"'{name}' is set by imagefactory in every image"
                reader.fault(key.where, "name-reserved", message, "remove it")
            yield name, reader.text(value, name, value_rule), value.where


def read_files(reader: NodeReader, node: YamlNode | None) -> tuple[FilesSpec, ...]:
    files = []
    for directory, key, value in reader.pairs(node, "files"):
        reader.text(key, "files", "folder")
        patterns = reader.texts(value, directory, "pattern", empty=False)
        files += [
            FilesSpec(folder=directory, pattern=item.text, where=item.where)
            for item in value.items
            if item.text in patterns
        ]
    return tuple(files)


def read_start(reader: NodeReader, fields: Mapping[str, YamlNode]) -> ContainerStart:
    """Return the written part of a container's start. A command may repeat a word."""

    def words(key: str) -> tuple[str, ...]:
        items = reader.items(fields.get(key), key, f"{key}: [python, train.py]")
        return tuple(reader.text(item, key, "argument") for item in items)

    return ContainerStart(
        entrypoint=words("entrypoint"),
        command=words("command"),
        workdir=reader.text(fields.get("workdir"), "workdir", "workdir"),
        user=reader.text(fields.get("user"), "user", "user"),
    )


# --- Rows by GPU: capabilities are AMD processors where `rocm` replaces `cuda`; CPU rows have none

CUDA_CHECK = "compiler"
"""The check of the smoke test that needs CUDA, because it compiles CUDA code."""


def check_rocm_row(
    reader: NodeReader, node: YamlNode, row: Mapping[str, YamlNode], family: Mapping[str, YamlNode]
) -> None:
    newest = knowledge.newest_rocm()
    if cuda := row.get("cuda"):
        write = "write a separate row for AMD GPUs, with only rocm"
        reader.fault(cuda.where, "mixed-row", "'cuda' and 'rocm' are in one row", write)
    for item in row["rocm"].items:
        if RULES["rocm"].allows(item.text) and int(item.text.partition(".")[0]) > newest:
            write = f"write a version of ROCm {newest} or older"
            reader.fault(item.where, "rocm-unknown", f"unknown ROCm version {item.text}", write)
    for item in row["checks"].items if "checks" in row else ():
        if item.text == CUDA_CHECK:
            message = f"the check '{CUDA_CHECK}' needs the CUDA compiler, and the row is for ROCm"
            reader.fault(item.where, "check-not-applicable", message, "remove it")
    capabilities = row.get("capabilities") or family.get("capabilities")
    amd = capabilities is not None and any(item.text.startswith("gfx") for item in capabilities.items)
    if capabilities is None or ("capabilities" not in row and not amd):
        message = "'capabilities' with AMD processors is missing in the row"
        write = "write the processors that the image must support: capabilities: [gfx90a, gfx942]"
        reader.fault(node.where, "capabilities-missing", message, write)


def check_processors(reader: NodeReader, capabilities: YamlNode | None, *, rocm: bool) -> None:
    """Report `capabilities` of other GPUs than the row's, and unknown AMD processors."""
    for item in capabilities.items if capabilities else ():
        if not RULES["capability"].allows(item.text):
            continue
        amd = item.text.startswith("gfx")
        if amd and not rocm:
            message = f"'{item.text}' is an AMD processor, and the row is for CUDA"
            write = "write a separate row for AMD GPUs, with rocm instead of cuda"
            reader.fault(item.where, "capability-mismatch", message, write)
        elif rocm and not amd:
            message = f"'{item.text}' is not an AMD processor, and the row is for ROCm"
            reader.fault(item.where, "capability-mismatch", message, "write an AMD processor, such as gfx90a")
        elif amd and item.text not in knowledge.all_processors():
            alternatives = " or ".join(
                str(processor)
                for processor in knowledge.processors()
                if str(processor)[:-1] == item.text[:-1]
            )
            write = (
                f"did you mean {alternatives}?"
                if alternatives
                else "write the processor that `rocminfo` prints"
            )
            reader.fault(item.where, "capability-unknown", f"unknown AMD processor '{item.text}'", write)


def in_order(capabilities: Sequence[str]) -> tuple[str, ...]:
    """Return capabilities in numerical order, gfx908 before gfx90a, and invalid ones last."""

    def order(text: str) -> tuple[object, ...]:
        try:
            return 0, parse_capability(text), ()
        except ValueError:
            return 1, Capability(0, 0), natural(text)

    return tuple(sorted(capabilities, key=order))


def check_gpu_row(
    reader: NodeReader, node: YamlNode, row: Mapping[str, YamlNode], family: Mapping[str, YamlNode]
) -> None:
    if "capabilities" not in row and "capabilities" not in family:
        message = "'capabilities' is missing in the row and in the family"
        write = 'write the capabilities that the image must support: capabilities: ["8.0"]'
        reader.fault(node.where, "capabilities-missing", message, write)
    if named := row.get("framework"):
        message = "'framework' in a row requires cuda: [none] or rocm"
        write = "remove it: CUDA rows use the family's framework"
        reader.fault(named.where, "framework-in-gpu-row", message, write)


def check_cpu_row(reader: NodeReader, row: Mapping[str, YamlNode]) -> None:
    versions = row["cuda"].items
    for item in versions:
        if item.text == NO_CUDA and len(versions) > 1:
            write = "write a separate row for CPUs, with cuda: [none]"
            reader.fault(item.where, "mixed-row", "'none' and CUDA versions are in one row", write)
    about = [(key, row[key].where) for key in ("capabilities", "waive") if key in row]
    if "virtual" in row:
        about += [("virtual.cuda", key.where) for key, _ in row["virtual"].pairs if key.text == "cuda"]
    if "checks" in row:
        about += [(item.text, item.where) for item in row["checks"].items if item.text in GPU_CHECKS]
    for key, location in about:
        reader.fault(
            location, "gpu-only-key", f"'{key}' is for GPUs, and cuda: [none] is for CPUs", "remove it"
        )


# --- The file

# Key -> an example of the line, for the message that it is missing.
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
_ROW_REQUIRED = {"version": 'version: "2.3"', "cuda": 'cuda: ["12.1"]'}
_VIRTUAL = {"cuda": "driver", "glibc": "glibc", "archspec": "archspec"}
_OF_CONDA = ("channels", "channel-priority", "virtual", "pip")
_LISTS = (
    "capabilities",
    "checks",
    "waive",
    "packages",
    "constraints",
    "environment",
    "index",
    "exclude",
    "cooldown",
)
_OVERRIDABLE = (*_LISTS, *_OF_CONDA)
_OF_FAMILIES = ("labels", "system", "files", *START_KEYS)
_FROZEN = ("file", "environment", "extras", "groups", "skip")
# The lock of another tool has the packages, so these keys would have no effect.
_NOT_WITH_FROZEN = ("packages", "constraints", "pip", "index", "exclude", "extras", "channel-priority")
_FAMILY_KEYS = (*_FAMILY_REQUIRED, "on", "frozen", *_OF_FAMILIES, *BASE_ONLY_KEYS, *_OVERRIDABLE)
_OWN = ("framework", "description", "labels", "extras", "python", "base")
_ROW_KEYS = (*_ROW_REQUIRED, "rocm", "on", *_OWN, *BASE_ONLY_KEYS, "platforms", *_OVERRIDABLE)
# A family that is built on a target has only these keys; the target brings the rest.
_KEYS_WITH_ON = ("family", "description", "matrix", "on", "pip", *_OF_FAMILIES, *_LISTS)
_NOT_WITH_ON = {*_FAMILY_KEYS, *_ROW_KEYS} - {*_KEYS_WITH_ON}


def parse_recipe(text: str, file: str) -> Recipe:
    """Return one family from the text of its YAML file. `file` is its name in errors.

    `expand` checks what needs other files: the base, the parent target, the versions of the source. Raises
    RecipeError with all problems of the file.
    """
    reader = NodeReader(file)
    root = parse_tree(text, file)
    kind = _family_type(root)
    fields = reader.mapping(root, _FAMILY_KEYS, _family_required(kind, on="on" in root.keys))
    _check_misplaced_keys(reader, root, kind)
    texts = {
        key: reader.text(fields.get(key), key, key)
        for key in _FAMILY_REQUIRED
        if key not in ("base", "matrix") and (kind != "on" or key in _KEYS_WITH_ON)
    }
    labels = read_labels(reader, fields.get("labels"))
    system = reader.texts(fields.get("system"), "system", "debian package", empty=False)
    framework = _framework(kind, texts.get("framework", ""))
    family = _FamilyDefaults(
        fields=fields,
        texts=texts,
        base=BaseName(name="") if kind == "on" else read_base(reader, fields),
        common=_common(reader, fields, kind, root.where),
        kind=kind,
        framework=framework,
    )
    if kind == "on" and "on" in fields:
        matrix = [_row_on(reader, family, root)]
    else:
        rows = reader.items(fields.get("matrix"), "matrix", "rows, each starting with - version:")
        make_row = _row_on if kind == "on" else _row
        matrix = [make_row(reader, family, row) for row in rows]
        channel_rows = [
            (framework, family.common.channels),
            *((row.framework, row.channels) for row in matrix),
        ]
        for section, (named, channels) in zip((root, *rows), channel_rows, strict=True):
            _check_fit(reader, section, RequirementContext(kind=kind, framework=named, channels=channels))
    matrix = with_origins(reader, root, kind, framework, matrix)
    files, start = read_files(reader, fields.get("files")), read_start(reader, fields)
    frozen = _read_frozen(reader, root, fields)
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
        frozen=frozen,
    )


def _read_frozen(reader: NodeReader, root: YamlNode, fields: Mapping[str, YamlNode]) -> FrozenSpec | None:
    """Return the lock of another tool that has the packages. Reports keys that it excludes."""
    if (node := fields.get("frozen")) is None:
        return None
    values = reader.mapping(node, _FROZEN, {"file": 'file: "./uv.lock"'})
    matrix = root.get("matrix")
    rows = matrix.items if matrix and matrix.kind == "list" else []
    for section in (root, *rows):
        for key, _ in section.pairs if section.kind == "map" else ():
            if key.text in _NOT_WITH_FROZEN:
                message = f"'{key.text}' has no effect: all packages come from the lock in 'frozen'"
                reader.fault(key.where, "key-not-with-frozen", message, "remove it, or remove 'frozen'")
    builds = [
        item
        for row in rows
        for key in ("cuda", "rocm", "platforms")
        if (value := row.get(key))
        for item in value.items
    ]
    if matrix and (len(rows) != 1 or len(builds) != 1):
        message = "'frozen' needs a matrix with one row and one build, because a lock has one environment"
        reader.fault(matrix.where, "frozen-matrix", message, "write a family for each lock")
    skipped = reader.texts(values.get("skip"), "skip", "excluded package")
    return FrozenSpec(
        file=reader.text(values.get("file"), "file", "frozen file"),
        where=node.where,
        environment=reader.text(values.get("environment"), "environment", "extra"),
        extras=reader.texts(values.get("extras"), "extras", "extra"),
        groups=reader.texts(values.get("groups"), "groups", "extra"),
        skip=tuple(map(canonical, skipped)),
    )


def _family_type(root: YamlNode) -> str:
    """Return `pypi`, `conda`, `on` for a family that is built on targets, or "" for none of these."""
    source = root.get("source")
    rows = root.get("matrix")
    if "on" in root.keys or (source is None and rows and any("on" in row.keys for row in rows.items)):
        return "on"
    return source.text if source and source.text in SOURCES else ""


def _family_required(kind: str, *, on: bool) -> Mapping[str, str]:
    if kind == "on":
        required = {key: _FAMILY_REQUIRED[key] for key in ("family", "description")}
        return required | ({} if on else {"matrix": "matrix: and rows such as - on: TARGET"})
    return _FAMILY_REQUIRED | ({"channels": "channels: [conda-forge]"} if kind == "conda" else {})


def _framework(kind: str, name: str) -> str:
    return name.lower() if kind == "conda" else canonical(name)


def _check_misplaced_keys(reader: NodeReader, section: YamlNode, kind: str) -> None:
    """Report keys that are not allowed with this source."""
    for key, value in section.pairs if section.kind == "map" else ():
        name, code = key.text, "key-not-for-source"
        if kind == "on" and name in _NOT_WITH_ON:
            code, message = "key-not-with-on", f"'{name}' comes from the target in 'on'"
            write = "remove it"
        elif kind == "on" and name == "matrix" and "on" in section.keys:
            code, message = "key-not-with-on", "'matrix' and 'on' cannot both be in a family"
            write = "remove one of them"
        elif kind == "pypi" and name in _OF_CONDA:
            message = f"'{name}' requires source: conda"
            write = "move its items to 'packages'" if name == "pip" else "remove it, or write source: conda"
        elif kind == "conda" and name == "rocm":
            message, write = "'rocm' requires source: pypi", "remove it: conda rows are for CUDA or CPUs"
        elif kind == "conda" and name == "extras" and value.kind == "list":
            message = "'extras' requires source: pypi, because conda packages have none"
            write = "remove it, and choose a build with a constraint such as 'jaxlib * *cuda12*'"
        elif kind != "on" and name == "on":
            code, message = "on-with-source", "'on' cannot be in a family that has a source"
            write = "create a separate family with 'on' instead of 'source'"
        else:
            continue
        reader.fault(key.where, code, message, write)


@dataclass(frozen=True, slots=True, kw_only=True)
class _FamilyDefaults:
    """The family's default values for rows: its nodes and texts by key, its base, and its lists."""

    fields: Mapping[str, YamlNode]
    texts: Mapping[str, str]
    base: BaseName
    common: RecipeRow
    kind: str
    framework: str


def _common(
    reader: NodeReader, fields: Mapping[str, YamlNode], kind: str, location: SourceLocation
) -> RecipeRow:
    """Return the values that a family and a row can both set."""

    def requirements(key: str, rule: str, spelling: str = kind) -> tuple[str, ...]:
        return tuple(normal_requirement(text, spelling) for text in reader.texts(fields.get(key), key, rule))

    package, constraint = REQUIREMENT_RULES.get(kind, ("added package", "added package"))
    capabilities = reader.texts(fields.get("capabilities"), "capabilities", "capability", empty=False)
    checks = reader.texts(fields.get("checks"), "checks", "check", empty=False)
    waived = reader.texts(fields.get("waive"), "waive", "waived")
    channels = reader.texts(fields.get("channels"), "channels", "channel", empty=False)
    virtual = reader.mapping(fields["virtual"], tuple(_VIRTUAL), {}) if "virtual" in fields else {}
    return RecipeRow(
        where=location,
        capabilities=in_order(capabilities),
        checks=tuple(check for check in SMOKE_CHECKS if check in checks),
        waive=tuple(check for check in WAIVABLE if check in waived),
        packages=requirements("packages", package),
        constraints=requirements("constraints", constraint),
        environment=read_environment(reader, fields.get("environment")),
        channels=tuple(dict.fromkeys(map(channel_address, channels))),
        priority=reader.text(fields.get("channel-priority"), "channel-priority", "channel-priority"),
        virtual=tuple(
            (key, reader.text(virtual[key], key, rule)) for key, rule in _VIRTUAL.items() if key in virtual
        ),
        pip=requirements("pip", "package", "pypi"),
        origins=read_origins(reader, fields.get("index")),
        exclude=tuple(map(canonical, reader.texts(fields.get("exclude"), "exclude", "excluded package"))),
        cooldown=reader.text(fields.get("cooldown"), "cooldown", "cooldown"),
    )


def _merge(
    reader: NodeReader, common: RecipeRow, child_row: RecipeRow, row: Mapping[str, YamlNode]
) -> RecipeRow:
    """Return a row's values. Some extend the family's; those in `row` replace them."""
    joined: dict[str, Any] = {
        key: tuple(dict.fromkeys((*getattr(common, key), *getattr(child_row, key))))
        for key in ("packages", "constraints", "pip", "exclude")
    }
    replaced: dict[str, Any] = {
        key: getattr(child_row if key in row else common, key)
        for key in ("capabilities", "environment", "waive")
    }
    return replace(
        child_row,
        **joined,
        **replaced,
        checks=child_row.checks or common.checks,
        origins=tuple((dict(common.origins) | dict(child_row.origins)).items()),
        channels=child_row.channels or common.channels,
        priority=child_row.priority or common.priority or "strict",
        cooldown=child_row.cooldown or common.cooldown,
        virtual=tuple((dict(common.virtual) | dict(child_row.virtual)).items()),
        description=reader.text(row.get("description"), "description", "description"),
        labels=read_labels(reader, row.get("labels")),
    )


def _row(reader: NodeReader, family: _FamilyDefaults, node: YamlNode) -> RecipeRow:
    """Return one row of the matrix, completed by the family's values."""
    fields = family.fields
    in_place = {"version": _ROW_REQUIRED["version"]} if "rocm" in node.keys else _ROW_REQUIRED
    row = reader.mapping(node, _ROW_KEYS, in_place)
    _check_misplaced_keys(reader, node, family.kind)
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
    merged = _merge(reader, family.common, _common(reader, row, family.kind, node.where), row)
    framework = _framework(family.kind, reader.text(row.get("framework"), "framework", "framework"))
    framework = framework or family.framework
    checks = merged.checks or default_checks(framework)
    without = (CUDA_CHECK,) if rocms else () if gpu else GPU_CHECKS
    keys = ("base", "python", "extras", "system", "framework")
    places = {key: value.where for key in keys if (value := row.get(key) or fields.get(key))}
    for section in (fields, row):
        virtual = section["virtual"].pairs if "virtual" in section else ()
        places |= {f"virtual.{key.text}": value.where for key, value in virtual}
    for key in ("cuda", "rocm"):
        places |= {f"{key}.{n}": item.where for n, item in enumerate(row[key].items if key in row else ())}
    places |= _requirement_places(fields, row)
    platforms = reader.texts(row.get("platforms"), "platforms", "platform", empty=False)
    written = read_base(reader, row)
    python = reader.text(row.get("python"), "python", "python") or family.texts["python"]
    base, carried = (written, python) if "base" in row else (family.base, family.texts["python"])
    return replace(
        merged,
        version=reader.text(row.get("version"), "version", "version"),
        cuda=() if rocms else cudas,
        rocm=rocms,
        extras=tuple(canonical(extra) for extra in reader.texts(row.get("extras"), "extras", "extra")),
        python=python,
        base=base.name,
        platforms=platforms or (family.texts["platform"],),
        capabilities=merged.capabilities if gpu else (),
        waive=merged.waive if gpu else (),
        checks=tuple(check for check in checks if check not in without),
        virtual=tuple(pair for pair in merged.virtual if gpu or pair[0] != "cuda"),
        framework=framework,
        # A conda environment brings its own Python, so the image's does not matter.
        own_base=base.own("" if family.kind == "conda" else carried),
        places=tuple(places.items()),
    )


def _row_on(reader: NodeReader, family: _FamilyDefaults, node: YamlNode) -> RecipeRow:
    """Return the additions of a family, or of its row, to another target. Only `expand` can check them."""
    fields = family.fields
    if "on" in fields:
        row, common = fields, family.common
    else:
        row = reader.mapping(node, _ROW_KEYS, {"on": "on: pytorch-2.3-cu121"})
        _check_misplaced_keys(reader, node, "on")
        common = _common(reader, row, "on", node.where)
    sections = (("on", row), ("system", fields))
    places = {key: section[key].where for key, section in sections if key in section}
    places |= _requirement_places(fields, row)
    for section in (fields, row):
        checks = section["checks"].items if "checks" in section else ()
        places |= {f"checks.{item.text}": item.where for item in checks}
    merged = _merge(reader, family.common, common, row)
    return replace(
        merged,
        where=node.where,
        channels=(),
        priority="strict",
        virtual=(),
        places=tuple(places.items()),
        on=reader.text(row.get("on"), "on", "on"),
    )


def _requirement_places(*sections: Mapping[str, YamlNode]) -> dict[str, SourceLocation]:
    """Return the first location of each requirement of a row, such as `packages.0`."""
    places: dict[str, SourceLocation] = {}
    for key in ("packages", "constraints", "pip", "exclude"):
        first: dict[str, SourceLocation] = {}
        for section in sections:
            for item in section[key].items if key in section else ():
                first.setdefault(item.text, item.where)
        places |= {f"{key}.{index}": location for index, location in enumerate(first.values())}
    return places


def _check_fit(reader: NodeReader, node: YamlNode, source: RequirementContext) -> None:
    """Report problems that depend on source and framework. `expand` checks rows `on` a target."""
    for key, value in node.pairs if source.kind in SOURCES else ():
        for item in value.items:
            fault = None
            if key.text in ("packages", "constraints") and item.kind == "text":
                fault = requirement_problem(item.text, key.text, source)
            elif key.text == "checks":
                fault = check_name_problem(item.text, source.framework)
            if fault:
                reader.fault(item.where, *fault)
