"""Expand recipes to targets: each row of a matrix becomes its targets, also those on parents. No I/O.

These checks need more than one recipe: its base, its source, its parent target.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest

from packaging.utils import parse_wheel_filename

from imagefactory.errors import Diagnostic, NothingSelectedError, RecipeError
from imagefactory.gpu import knowledge
from imagefactory.gpu.capability import AMD64, MACHINES, with_suffix
from imagefactory.gpu.values import platform_of, rocm_of
from imagefactory.model import NO_CUDA, BaseSpec, ContainerStart, SourceLocation, Target
from imagefactory.recipes.bases import all_bases
from imagefactory.recipes.family import Recipe, RecipeRow
from imagefactory.recipes.names import KnownNames, choose_name, choose_names, suggest
from imagefactory.recipes.values import (
    GPU_CHECKS,
    REQUIREMENT_RULES,
    RULES,
    CondaSpec,
    NodeReader,
    RequirementContext,
    canonical,
    channel_address,
    check_name_problem,
    is_source,
    named_packages,
    normal_requirement,
    package_of,
    parse_spec,
    requirement_problem,
)
from imagefactory.recipes.yaml_tree import YamlNode, show
from imagefactory.versions import natural, nearest

# --- Problems of a row that need more than its recipe: its base, its source, its parent


def place_of(row: RecipeRow, key: str) -> SourceLocation:
    return dict(row.places).get(key, row.where)


def _at(row: RecipeRow, key: str, code: str, message: str, write: str) -> Diagnostic:
    return Diagnostic(code, str(place_of(row, key)), message, write)


def requirement_places(recipes: Iterable[Recipe], target: Target) -> dict[str, SourceLocation]:
    """Return the location of each requirement and constraint in the row of a target."""
    places: dict[str, SourceLocation] = {}
    for row in (row for recipe in recipes for row in recipe.matrix if row.where == target.where):
        for key in ("packages", "constraints", "pip"):
            for index, text in enumerate(getattr(row, key)):
                places.setdefault(text, place_of(row, f"{key}.{index}"))
    return places


def addition_problems(row: RecipeRow, parent: Target) -> Iterator[Diagnostic]:
    """Yield the problems of additions that the source of the parent target does not support."""
    source = RequirementContext(
        kind=parent.source, framework=parent.framework, channels=parent.channels, on=parent.name
    )
    for key, rule in zip(("packages", "constraints"), REQUIREMENT_RULES[parent.source], strict=True):
        for index, text in enumerate(getattr(row, key)):
            fault = requirement_problem(text, key, source)
            if not RULES[rule].allows(text):
                message = f"'{key}' cannot be {show(text)}, because {parent.name} has source: {parent.source}"
                fault = "value-invalid", message, f"write {RULES[rule].write}"
            if fault:
                yield _at(row, f"{key}.{index}", *fault)
    for check in row.checks:
        fault = check_name_problem(check, parent.framework)
        if check in GPU_CHECKS and not parent.gpu:
            message = f"the check '{check}' is for GPU images, and {parent.name} is for CPUs"
            fault = "gpu-only-key", message, "remove it"
        if fault:
            yield _at(row, f"checks.{check}", *fault)
    for key in ("capabilities", "waive"):
        if getattr(row, key) and not parent.gpu:
            message = f"'{key}' is for GPUs, and {parent.name} is for CPUs"
            yield _at(row, key, "gpu-only-key", message, "remove it")
    for text in row.capabilities if parent.gpu else ():
        if text.startswith("gfx") != bool(rocm_of(parent.cuda)):
            message = f"{text} cannot run {parent.name}, which is for {platform_of(parent.cuda)}"
            yield _at(row, "capabilities", "capability-mismatch", message, "remove it")
    if row.pip and parent.source != "conda":
        message = f"'pip' requires a conda target, and {parent.name} takes all packages from PyPI"
        yield _at(row, "pip.0", "key-not-for-source", message, "write these under 'packages'")


def exclude_problems(row: RecipeRow, target: Target) -> Iterator[Diagnostic]:
    """Yield the problems of packages that cannot be excluded from a target."""
    named = named_packages(target)
    for index, name in enumerate(row.exclude):
        key = f"exclude.{index}"
        if name in named:
            message = f"'{name}' is excluded, but {target.name} requires it"
            yield _at(row, key, "exclude-conflict", message, "remove one of the two")
        elif target.source == "conda" and not target.pip:
            message = f"'exclude' is for PyPI packages, and {target.name} has none"
            yield _at(row, key, "key-not-for-source", message, "remove it")


def base_problems(row: RecipeRow, base: BaseSpec | None, names: Sequence[str]) -> Iterator[Diagnostic]:
    if base is None:
        suggestion = nearest(row.base, names)
        hint = (
            f"did you mean '{suggestion}'?"
            if suggestion
            else f"the bases are {', '.join(names) or 'none yet'}"
        )
        yield _at(row, "base", "base-unknown", f"no base '{row.base}'", hint)


def virtual_package_problems(
    row: RecipeRow, index: int, base: BaseSpec | None, platform: str
) -> Iterator[Diagnostic]:
    """Yield the problems of virtual packages that no machine has, or no machine for the image."""
    cuda, virtual = row.cuda[index], dict(row.virtual)
    if base and "glibc" in virtual and natural(virtual["glibc"]) > natural(base.glibc):
        message = f"base '{base.name}' has glibc {base.glibc}, older than {virtual['glibc']}"
        write = f'write "{base.glibc}" or less, or remove it'
        yield _at(row, "virtual.glibc", "glibc-too-new", message, write)
    machine = MACHINES.get(platform, "")
    if "archspec" in virtual and not virtual["archspec"].startswith(machine):
        message = f"'{virtual['archspec']}' is not a processor of {platform}"
        write = f"write {machine}, remove it, or write a row per platform"
        yield _at(row, "virtual.archspec", "archspec-mismatch", message, write)
    if cuda == NO_CUDA:
        return
    driver, newest = virtual.get("cuda") or cuda, knowledge.newest_cuda()
    key = "virtual.cuda" if "cuda" in virtual else f"cuda.{index}"
    if "." not in driver:
        message = f"CUDA {cuda} does not say which driver the packages need"
        write = f'write virtual: {{cuda: "{cuda}.4"}} with the oldest supported driver'
        yield _at(row, key, "driver-missing", message, write)
    elif int(driver.partition(".")[0]) > newest or not RULES["driver"].allows(driver):
        message = f"no driver is known for CUDA {driver}"
        yield _at(row, key, "driver-unknown", message, f"write a version of CUDA {newest} or older")
    elif natural(driver.partition(".")[0]) < natural(cuda.partition(".")[0]):
        message = f"a driver for CUDA {driver} cannot run CUDA {cuda}"
        write = f"write a version of CUDA {cuda.partition('.')[0]}, or remove it"
        yield _at(row, key, "driver-mismatch", message, write)


def source_problems(row: RecipeRow, index: int, platform: str) -> Iterator[Diagnostic]:
    """Yield versions that the source is known to lack. The solver checks others, and other platforms."""
    cuda, name = row.builds[index], f"{row.framework} {row.version}"
    wheels = knowledge.offered(row.framework, row.version)
    if cuda == NO_CUDA or rocm_of(cuda):
        whose = "CPUs" if cuda == NO_CUDA else "AMD GPUs"
        yield from _cpu_problems(row, name, {extra for wheel in wheels for extra in wheel.extras}, whose)
        return
    if platform != AMD64 or not wheels or row.framework in dict(row.origins):  # known only for PyPI
        return
    fitting = [wheel for wheel in wheels if wheel.cuda == cuda]
    if not fitting:
        known = sorted({wheel.cuda for wheel in wheels}, key=natural)
        offers = " and ".join(known)
        write = " or ".join(f'"{version}"' for version in known)
        message = f"{name} on PyPI is built for CUDA {offers}, not {cuda}"
        yield _at(row, f"cuda.{index}", "cuda-not-offered", message, f"write {write}")
        return
    wheel = fitting[0]
    if missing := [extra for extra in wheel.extras if extra not in row.extras]:
        message = f"{name} on PyPI has CUDA {cuda} only with the extras {' and '.join(map(repr, missing))}"
        yield _at(row, "extras", "extras-missing", message, f"write extras: [{', '.join(wheel.extras)}]")
    if wheel.python and natural(row.python) < natural(wheel.python):
        message = f"{name} on PyPI needs Python {wheel.python} or newer, not {row.python}"
        yield _at(row, "python", "python-too-old", message, "choose a base that has it")


def _cpu_problems(row: RecipeRow, name: str, gpu_extras: set[str], whose: str) -> Iterator[Diagnostic]:
    """Yield packages that bring CUDA to a row for other devices. The lock detects unknown ones."""
    if re.search(r"(^|-)(gpu|cu(da)?[0-9]+x?)$", row.framework):
        such = "tensorflow-rocm" if row.rocm else "onnxruntime"
        message = f"'{row.framework}' is built for CUDA, and the row is for {whose}"
        write = f"write the build for {whose} in the row, such as framework: {such}"
        yield _at(row, "framework", "build-mismatch", message, write)
    for extra in sorted(gpu_extras.intersection(row.extras)):
        message = f"the extra '{extra}' of {name} brings CUDA, and the row is for {whose}"
        yield _at(row, "extras", "build-mismatch", message, "remove it")


# --- Packages that come from elsewhere than the machine's package index
# `index` names the only index of a package. A wheel of the project is listed in `packages` or `pip` by its
# path. Here it becomes its exact version, with the path as its origin.
# Directories and repositories without a wheel are collected separately.


def read_origins(reader: NodeReader, node: YamlNode | None) -> tuple[tuple[str, str], ...]:
    """Return (normalized name, name of an index) in written order."""
    indexes: dict[str, str] = {}
    for name, key, value in reader.pairs(node, "index"):
        if not reader.text(key, "index", "framework"):
            continue
        if canonical(name) in indexes:
            reader.fault(key.where, "duplicate-key", f"duplicate {show(name)}", "remove one of them")
        indexes[canonical(name)] = reader.text(value, name, "index name")
    return tuple(indexes.items())


def with_origins(
    reader: NodeReader, root: YamlNode, kind: str, framework: str, matrix: Sequence[RecipeRow]
) -> list[RecipeRow]:
    """Return the rows of a recipe with their origins. Reports origins that no row uses."""
    required = [_pypi_requirements(row, kind, framework) for row in matrix]
    _check_index_used(reader, root.get("index"), frozenset().union(*required), kind)
    section = root.get("matrix")
    nodes = section.items if section and section.kind == "list" else []
    for node, node_origins in zip(nodes, required, strict=False):
        _check_index_used(reader, node.get("index"), node_origins, kind)
    rows = []
    for row, node_origins, node in zip_longest(matrix, required, nodes[: len(matrix)]):
        named = {name: index for name, index in row.origins if name in node_origins}
        files = _files(reader, [section for section in (node, root) if section], row, named)
        rows.append(
            replace(
                row,
                packages=tuple(dict.fromkeys(map(_exact, _without_sources(row.packages)))),
                pip=tuple(dict.fromkeys(map(_exact, _without_sources(row.pip)))),
                sources=tuple(_sources(row)),
                origins=tuple(sorted((named | files).items())),
            )
        )
    return rows


def origin_problems(row: RecipeRow, parent: Target) -> Iterator[Diagnostic]:
    """Yield origins other than channels, if the parent is a conda target."""
    pip = set(map(package_of, row.pip))
    for key, text in row.sources if parent.source == "conda" else ():
        if key == "packages":
            message = f"{show(text)} under 'packages' is not in the channels of {parent.name}"
            yield Diagnostic("not-a-channel-package", str(row.where), message, "write it under 'pip'")
    for name, _ in row.origins if parent.source == "conda" else ():
        if name not in pip:
            message = (
                f"'{name}' under 'packages' must come from the channels of {parent.name}, not "
                "from an index or a file"
            )
            yield Diagnostic("not-a-channel-package", str(row.where), message, "write it under 'pip'")


def _sources(row: RecipeRow) -> Iterator[tuple[str, str]]:
    for key, texts in (("packages", row.packages), ("pip", row.pip)):
        yield from ((key, text) for text in dict.fromkeys(texts) if is_source(text))


def _without_sources(texts: Iterable[str]) -> list[str]:
    return [text for text in texts if not is_source(text)]


def _files(
    reader: NodeReader, sections: Sequence[YamlNode], row: RecipeRow, named: Mapping[str, str]
) -> dict[str, str]:
    """Return the project's wheels in a row, by package."""
    wheels: dict[str, str] = {}
    for text in (
        entry for entry in (*row.packages, *row.pip) if entry.startswith("./") and not is_source(entry)
    ):
        name = package_of(text)
        if name in named or name in wheels:
            location = _item(sections, text) or row.where
            other = wheels.get(name) or f"the index '{named[name]}'"
            reader.fault(
                location, "origin-conflict", f"'{name}' already comes from {other}", "remove one of the two"
            )
        wheels[name] = text
    return wheels


def _item(sections: Sequence[YamlNode], text: str) -> SourceLocation | None:
    lists = (node for section in sections for key in ("packages", "pip") if (node := section.get(key)))
    return next((item.where for node in lists for item in node.items if item.text == text), None)


def _exact(text: str) -> str:
    """Return a requirement; for a wheel's path the exact version of the wheel."""
    if not text.startswith("./"):
        return text
    _, version, *_ = parse_wheel_filename(text.rpartition("/")[2])
    return f"{package_of(text)}=={version}"


def _pypi_requirements(row: RecipeRow, kind: str, framework: str) -> frozenset[str]:
    """Return the names that a row requires from PyPI, for a row on a parent all possible ones."""
    row_requirements = _without_sources((*(() if kind == "conda" else row.packages), *row.pip))
    return frozenset({*map(package_of, row_requirements), *((framework,) if kind == "pypi" else ())})


def _check_index_used(
    reader: NodeReader, node: YamlNode | None, required: Collection[str], kind: str
) -> None:
    """Report an index that no named requirement uses. uv queries it only for those, not for dependencies."""
    for key, _ in node.pairs if node and node.kind == "map" else ():
        if key.kind == "text" and canonical(key.text) not in required:
            reader.fault(
                key.where,
                "index-unused",
                f"{show(key.text)} has an index, but is not a package of this recipe",
                f"add it to '{'pip' if kind == 'conda' else 'packages'}', or remove it here",
            )


PYTHON_CHANNEL = "conda-forge"
"""The channel of Python if a base lacks the Python of a recipe with PyPI packages."""


def expand(recipe: Recipe, bases: Sequence[BaseSpec]) -> tuple[Target, ...]:
    """Return the targets of one recipe, in the order of its matrix.

    Raises RecipeError for a missing base, a Python that the base lacks, a CUDA version that the source lacks,
    virtual packages of no machine, a duplicate target, or a parent in another recipe (see `expand_all`).
    """
    return _unique(*_expand([recipe], {base.name: base for base in bases}))


def expand_all(recipes: Iterable[Recipe], bases: Sequence[BaseSpec]) -> tuple[Target, ...]:
    """Return the targets of all recipes, sorted naturally (1.13, 2.3, 2.15). Raises like `expand`."""
    return _expand_all(recipes, {base.name: base for base in bases})


def _expand_all(recipes: Iterable[Recipe], bases: dict[str, BaseSpec]) -> tuple[Target, ...]:
    return tuple(sorted(_unique(*_expand(recipes, bases)), key=lambda target: natural(target.name)))


def expand_lenient(
    recipes: Iterable[Recipe], bases: Sequence[BaseSpec], faults: Mapping[str, tuple[Diagnostic, ...]]
) -> tuple[tuple[BaseSpec, ...], tuple[Target, ...], dict[str, tuple[Diagnostic, ...]]]:
    """Return all bases, the targets of the valid recipes, and the problems of the others by family.

    `faults` are those of unreadable files, by family. A recipe on a target of an invalid recipe is skipped,
    with its own problem.
    """
    sound, faulty = list(recipes), dict(faults)
    while True:
        families = [*faulty, *(recipe.family for recipe in sound)]
        waiting = {r.family: problems for r in sound if (problems := tuple(_waits(r, families, faulty)))}
        try:
            if not waiting:
                whole = {base.name: base for base in all_bases(bases, sound)}
                targets = _expand_all(sound, whole)
                return tuple(whole.values()), targets, dict(sorted(faulty.items()))
        except RecipeError as error:
            for recipe in sound:
                if own_faults := tuple(
                    f for f in error.diagnostics if f.location.startswith(f"{recipe.where.file}:")
                ):
                    waiting[recipe.family] = own_faults
            if not waiting:
                raise
        faulty |= waiting
        sound = [recipe for recipe in sound if recipe.family not in faulty]


def _waits(recipe: Recipe, families: Sequence[str], faulty: Mapping[str, object]) -> Iterator[Diagnostic]:
    for row in recipe.matrix:
        owners = [family for family in families if row.on.startswith(f"{family}-")]
        if owners and (owner := max(owners, key=len)) in faulty:
            message = f"the recipe of '{row.on}' has problems"
            yield Diagnostic("parent-invalid", str(place_of(row, "on")), message, f"fix {owner}.yaml")


def select(targets: Sequence[Target], names: Sequence[str]) -> tuple[Target, ...]:
    """Return the targets that `names` select (names, prefixes, families or patterns); all if it is empty.

    Raises NothingSelectedError for a name without a match, UsageError for a prefix of several targets.
    """
    if base := next((name for name in names if name.startswith("base:")), ""):
        raise NothingSelectedError(
            "target-unknown",
            f"{show(base)} is a base, not a target",
            hint="use a target on this base; to lock the base, run imagefactory lock base:NAME",
        )
    chosen = choose_names(names, _known_targets(targets))
    return tuple(target for target in targets if target.name in chosen)


def select_single(targets: Sequence[Target], name: str) -> Target:
    """Return the one target that `name` selects. Raises UsageError for several."""
    (chosen,) = select(targets, (choose_name(name, _known_targets(targets)),))
    return chosen


def _known_targets(targets: Iterable[Target]) -> KnownNames:
    return {target.name: target.family for target in targets}


def _expand(recipes: Iterable[Recipe], bases: dict[str, BaseSpec]) -> tuple[list[Target], list[Diagnostic]]:
    """Return targets and problems. Adds the bases that recipes describe to `bases`, by name."""
    targets = []
    faults: list[Diagnostic] = []
    above = []
    for recipe in recipes:
        for row in recipe.matrix:
            if row.on:
                above.append((recipe, row))
                continue
            base = row.own_base or bases.get(row.base)
            faults += base_problems(row, base, tuple(bases))
            for platform in row.platforms:
                for index, cuda in enumerate(row.builds):
                    if recipe.source == "conda":
                        faults += virtual_package_problems(row, index, base, platform)
                    elif not recipe.frozen:
                        faults += source_problems(row, index, platform)
                    target = _on_platform(_target(recipe, row, cuda, platform), base, bases, faults)
                    glibc = base.glibc if base else ""
                    if recipe.source == "pypi" and base and base.python != row.python:
                        target = replace(target, channels=(channel_address(PYTHON_CHANNEL),))
                    target = replace(target, virtual=_all_virtual(target, row, glibc))
                    faults += exclude_problems(row, target)
                    targets.append(_on_system(target, recipe, row, bases, faults))
    _build_on(above, targets, bases, faults)
    return targets, faults


def _target(recipe: Recipe, row: RecipeRow, cuda: str, platform: str) -> Target:
    built_for = "cpu" if cuda == NO_CUDA else cuda if rocm_of(cuda) else f"cu{cuda}"
    name = f"{recipe.family}-{row.version}-{built_for.replace('.', '')}"
    if row.python != recipe.python:
        name += f"-py{row.python.replace('.', '')}"
    own_fields = {
        "description": row.description or recipe.description,
        "labels": tuple((dict(recipe.labels) | dict(row.labels)).items()),
    }
    return Target(
        **row.shared() | own_fields,
        name=with_suffix(name, platform, recipe.platform),
        family=recipe.family,
        source=recipe.source,
        cuda=cuda,
        platform=platform,
        requirements=(_framework_requirement(recipe, row), *row.packages),
        files=recipe.files,
        start=recipe.start,
        sources=tuple(text for _, text in row.sources),
        frozen=recipe.frozen,
    )


def _on_platform(
    target: Target, base: BaseSpec | None, bases: dict[str, BaseSpec], faults: list[Diagnostic]
) -> Target:
    """Return the target on the base for its platform. The name of that base has a platform suffix."""
    if base is None or target.platform == base.platform:
        return target
    below = bases.get(base.name, base)
    base = replace(below, name=with_suffix(below.name, target.platform), platform=target.platform)
    if (other := bases.setdefault(base.name, base)) != base:
        message = f"its base '{base.name}' for {base.platform} is already defined at {other.where}"
        faults.append(Diagnostic("duplicate-base", str(target.where), message, "rename one of them"))
    return replace(target, base=base.name)


def _on_system(
    target: Target, recipe: Recipe, row: RecipeRow, bases: dict[str, BaseSpec], faults: list[Diagnostic]
) -> Target:
    """Return the target on a base with the recipe's Debian packages, which has its own name."""
    below = bases.get(target.base) or row.own_base
    if not recipe.system or below is None:
        return target
    if below.image:
        message = f"{below.name} is an image of a registry, and 'system' requires a base of Debian packages"
        write = "remove 'system', or choose another base"
        faults.append(Diagnostic("base-not-debian", str(place_of(row, "system")), message, write))
    packages = tuple(dict.fromkeys((*below.packages, *recipe.system)))
    location, name = place_of(row, "system"), f"{below.name}-{recipe.family}"
    base = replace(below, name=name, packages=packages, where=location, on=below.name)
    if (other := bases.setdefault(name, base)) != base:
        message = f"its base '{name}' is already defined at {other.where}"
        faults.append(Diagnostic("duplicate-base", str(location), message, "rename one of them"))
    return replace(target, base=name)


def _framework_requirement(recipe: Recipe, row: RecipeRow) -> str:
    """Return the framework at the row's version, from the channel in its constraint.

    Under strict priority only a requirement can select a package of a later channel.
    """
    if recipe.source == "conda":
        specs = (parse_spec(text) for text in row.constraints)
        channel = next((spec.channel for spec in specs if spec.name == row.framework), "")
        return str(CondaSpec(name=row.framework, version=f"{row.version}.*", channel=channel))
    extras = f"[{','.join(row.extras)}]" if row.extras else ""
    return f"{row.framework}{extras}=={row.version}.*"


def _all_virtual(target: Target, row: RecipeRow, glibc: str) -> tuple[tuple[str, str], ...]:
    """Return the recipe's virtual packages of conda, else those of the oldest machine for the target."""
    if not target.conda:
        return ()
    virtual = {"glibc": glibc, "archspec": MACHINES[target.platform]} | dict(row.virtual)
    if target.source == "conda" and target.gpu:  # without a driver conda has no package __cuda
        virtual = {"cuda": target.cuda} | virtual
    return tuple(sorted((f"__{key}", value) for key, value in virtual.items()))


def _build_on(
    waiting: list[tuple[Recipe, RecipeRow]],
    targets: list[Target],
    bases: dict[str, BaseSpec],
    faults: list[Diagnostic],
) -> None:
    """Append the targets that are built on others, at any depth."""
    expanded = {target.name: target for target in targets}
    while ready := [pair for pair in waiting if pair[1].on in expanded]:
        waiting = [pair for pair in waiting if pair[1].on not in expanded]
        for recipe, row in ready:
            faults += [*addition_problems(row, expanded[row.on]), *origin_problems(row, expanded[row.on])]
            target = _on_system(_target_on(recipe, row, expanded[row.on]), recipe, row, bases, faults)
            faults += exclude_problems(row, target)
            targets.append(target)
            expanded.setdefault(target.name, target)
    for recipe, row in waiting:
        chain = _waits_for(recipe, row, waiting)
        if not chain:
            others = {
                name: target.family for name, target in expanded.items() if target.family != recipe.family
            }
            hint = suggest(row.on, others) or "choose a target whose family has 'source'"
            message = f"no target '{row.on}'"
            faults.append(Diagnostic("parent-unknown", str(place_of(row, "on")), message, hint))
        elif chain[-1] == recipe.family:
            round_trip = " -> ".join((recipe.family, *chain))
            message = f"'{recipe.family}' is built on itself: {round_trip}"
            write = "choose a target whose family has 'source'"
            faults.append(Diagnostic("parent-cycle", str(place_of(row, "on")), message, write))


def _waits_for(recipe: Recipe, row: RecipeRow, waiting: Sequence[tuple[Recipe, RecipeRow]]) -> list[str]:
    """Return the families that a row waits for, nearest first, up to a cycle or a missing family."""
    chain: list[str] = []
    while True:
        below = [pair for pair in waiting if row.on.startswith(f"{pair[0].family}-")]
        if not below:
            return chain
        parent, row = max(below, key=lambda pair: len(pair[0].family))
        again = parent.family in chain
        chain.append(parent.family)
        if again or parent.family == recipe.family:
            return chain


def _target_on(recipe: Recipe, row: RecipeRow, parent: Target) -> Target:
    def with_own(theirs: tuple[str, ...], added: tuple[str, ...], kind: str) -> tuple[str, ...]:
        allowed = [text for text in added if RULES[REQUIREMENT_RULES[kind][0]].allows(text)]
        return tuple(dict.fromkeys((*theirs, *(normal_requirement(text, kind) for text in allowed))))

    return replace(
        parent,
        name=recipe.family + parent.name.removeprefix(parent.family),
        family=recipe.family,
        description=row.description or recipe.description,
        capabilities=row.capabilities or parent.capabilities,
        checks=row.checks or parent.checks,
        requirements=with_own(parent.requirements, row.packages, parent.source),
        constraints=with_own(parent.constraints, row.constraints, parent.source),
        environment=tuple((dict(parent.environment) | dict(row.environment)).items()),
        pip=with_own(parent.pip, row.pip, "pypi"),
        where=row.where,
        on=parent.name,
        waive=row.waive or parent.waive,
        labels=tuple((dict(parent.labels) | dict(recipe.labels) | dict(row.labels)).items()),
        files=(*parent.files, *recipe.files),
        start=_start_on(recipe.start, parent.start),
        origins=tuple(sorted((dict(row.origins) | dict(parent.origins)).items())),
        sources=tuple(text for _, text in row.sources),
        frozen=None,
        exclude=tuple(dict.fromkeys((*parent.exclude, *row.exclude))),
        cooldown=row.cooldown or parent.cooldown,
    )


def _start_on(child: ContainerStart, parent: ContainerStart) -> ContainerStart:
    """Return a child's start. Its own values win, and a new entry point drops the parent's command."""
    return ContainerStart(
        entrypoint=child.entrypoint or parent.entrypoint,
        command=child.command or (() if child.entrypoint else parent.command),
        workdir=child.workdir or parent.workdir,
        user=child.user or parent.user,
    )


def _unique(targets: Iterable[Target], faults: Iterable[Diagnostic]) -> tuple[Target, ...]:
    """Return the targets, unless there are problems or duplicate names."""
    all_faults = list(dict.fromkeys(faults))  # rows that inherit a problem report it once
    first: dict[str, Target] = {}
    for target in targets:
        if (other := first.setdefault(target.name, target)) is not target:
            message = f"target '{target.name}' is also defined at {other.where}"
            all_faults.append(
                Diagnostic("duplicate-target", str(target.where), message, "remove one of them")
            )
    if all_faults:
        raise RecipeError(all_faults)
    return tuple(first.values())
