"""Recipe -> Target: each row of a matrix becomes its targets, also those that are built on others. Pure.

What a recipe alone cannot show is judged here: its base, what its source offers, the target below.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from imagefactory.errors import Diagnostic, NothingSelectedError, RecipeError
from imagefactory.gpu.builds import rocm_of
from imagefactory.gpu.platforms import MACHINES, with_suffix
from imagefactory.model import NO_CUDA, Base, Start, Target
from imagefactory.recipes.bases import all_bases
from imagefactory.recipes.match_spec import Spec, channel_address, parse_spec
from imagefactory.recipes.family import MatrixRow, Recipe
from imagefactory.recipes.names import Known, choose_name, choose_names, suggest
from imagefactory.recipes.origins import origin_faults
from imagefactory.recipes.row_faults import (
    addition_faults,
    base_faults,
    exclude_faults,
    place_of,
    source_faults,
    virtual_faults,
)
from imagefactory.recipes.values import REQUIREMENT_RULES, RULES, normal_requirement
from imagefactory.recipes.yaml_tree import show
from imagefactory.versions import natural

PYTHON_CHANNEL = "conda-forge"
"""Where Python comes from when a base has none of the version that a recipe of PyPI's packages names."""


def expand(recipe: Recipe, bases: Sequence[Base]) -> tuple[Target, ...]:
    """The targets of one recipe, in the order of its matrix.

    Raises RecipeError for a base that is not there, a Python that the base does not carry, a CUDA
    version that the source does not offer, virtual packages of no machine, a target that is made twice,
    or one that is built on a target of another recipe (`expand_all` knows those).
    """
    return _unique(*_expand([recipe], {base.name: base for base in bases}))


def expand_all(recipes: Iterable[Recipe], bases: Sequence[Base]) -> tuple[Target, ...]:
    """The targets of all recipes, sorted naturally (1.13 before 2.3 before 2.15). Raises like `expand`."""
    return _expand_all(recipes, {base.name: base for base in bases})


def _expand_all(recipes: Iterable[Recipe], bases: dict[str, Base]) -> tuple[Target, ...]:
    return tuple(sorted(_unique(*_expand(recipes, bases)), key=lambda target: natural(target.name)))


def expand_sound(
    recipes: Iterable[Recipe], bases: Sequence[Base], faults: Mapping[str, tuple[Diagnostic, ...]]
) -> tuple[tuple[Base, ...], tuple[Target, ...], tuple[Diagnostic, ...]]:
    """All bases and the targets of the recipes that have no fault, and the faults of all others.

    `faults` are those of files that could not be read, by family. What is built on a target of a recipe with
    faults waits for it, which is told as a fault of its own.
    """
    sound, told = list(recipes), dict(faults)
    while True:
        families = [*told, *(recipe.family for recipe in sound)]
        waiting = {r.family: held for r in sound if (held := tuple(_waits(r, families, told)))}
        try:
            if not waiting:
                whole = {base.name: base for base in all_bases(bases, sound)}
                targets = _expand_all(sound, whole)
                return (
                    tuple(whole.values()),
                    targets,
                    tuple(f for family in sorted(told) for f in told[family]),
                )
        except RecipeError as error:
            for recipe in sound:
                if own := tuple(
                    f for f in error.diagnostics if f.location.startswith(f"{recipe.where.file}:")
                ):
                    waiting[recipe.family] = own
            if not waiting:
                raise
        told |= waiting
        sound = [recipe for recipe in sound if recipe.family not in told]


def _waits(recipe: Recipe, families: Sequence[str], told: Mapping[str, object]) -> Iterator[Diagnostic]:
    for row in recipe.matrix:
        owners = [family for family in families if row.on.startswith(f"{family}-")]
        if owners and (owner := max(owners, key=len)) in told:
            what = f"the recipe of '{row.on}' has problems"
            yield Diagnostic("parent-invalid", str(place_of(row, "on")), what, f"fix {owner}.yaml")


def select(targets: Sequence[Target], names: Sequence[str]) -> tuple[Target, ...]:
    """The targets that `names` ask for (names, beginnings, families or patterns); all when empty.

    Raises NothingSelectedError for a name that fits no target, UsageError for one that begins several.
    """
    if base := next((name for name in names if name.startswith("base:")), ""):
        raise NothingSelectedError(
            "target-unknown",
            f"no target {show(base)}",
            hint="a base is built with the first target on it; to lock it: imagefactory lock base:NAME",
        )
    chosen = choose_names(names, _known(targets))
    return tuple(target for target in targets if target.name in chosen)


def select_one(targets: Sequence[Target], name: str) -> Target:
    """The one target of `name`. Raises UsageError for what fits several."""
    (chosen,) = select(targets, (choose_name(name, _known(targets)),))
    return chosen


def _known(targets: Iterable[Target]) -> Known:
    return {target.name: target.family for target in targets}


def _expand(recipes: Iterable[Recipe], bases: dict[str, Base]) -> tuple[list[Target], list[Diagnostic]]:
    """Targets and faults; `bases`, by name, gets those of bases and packages that recipes add to them."""
    targets = []
    faults: list[Diagnostic] = []
    above = []
    for recipe in recipes:
        for row in recipe.matrix:
            if row.on:
                above.append((recipe, row))
                continue
            base = row.own_base or bases.get(row.base)
            faults += base_faults(row, base, tuple(bases))
            for platform in row.platforms:
                for index, cuda in enumerate(row.builds):
                    if recipe.source == "conda":
                        faults += virtual_faults(row, index, base, platform)
                    else:
                        faults += source_faults(row, index, platform)
                    target = _on_platform(_target(recipe, row, cuda, platform), base, bases, faults)
                    glibc = base.glibc if base else ""
                    if recipe.source == "pypi" and base and base.python != row.python:
                        target = replace(target, channels=(channel_address(PYTHON_CHANNEL),))
                    target = replace(target, virtual=_all_virtual(target, row, glibc))
                    faults += exclude_faults(row, target)
                    targets.append(_on_system(target, recipe, row, bases, faults))
    _build_on(above, targets, bases, faults)
    return targets, faults


def _target(recipe: Recipe, row: MatrixRow, cuda: str, platform: str) -> Target:
    built_for = "cpu" if cuda == NO_CUDA else cuda if rocm_of(cuda) else f"cu{cuda}"
    name = f"{recipe.family}-{row.version}-{built_for.replace('.', '')}"
    if row.python != recipe.python:
        name += f"-py{row.python.replace('.', '')}"
    return Target(
        name=with_suffix(name, platform, recipe.platform),
        family=recipe.family,
        description=row.description or recipe.description,
        source=recipe.source,
        framework=row.framework,
        version=row.version,
        cuda=cuda,
        python=row.python,
        base=row.base,
        platform=platform,
        capabilities=row.capabilities,
        checks=row.checks,
        requirements=(_framework_requirement(recipe, row), *row.packages),
        constraints=row.constraints,
        environment=row.environment,
        where=row.where,
        channels=row.channels,
        priority=row.priority,
        pip=row.pip,
        waive=row.waive,
        labels=tuple((dict(recipe.labels) | dict(row.labels)).items()),
        files=recipe.files,
        start=recipe.start,
        origins=row.origins,
        sources=tuple(text for _, text in row.sources),
        exclude=row.exclude,
    )


def _on_platform(
    target: Target, base: Base | None, bases: dict[str, Base], faults: list[Diagnostic]
) -> Target:
    """The target on its base for its platform, which has a name of its own beside the one for amd64."""
    if base is None or target.platform == base.platform:
        return target
    below = bases.get(base.name, base)
    made = replace(below, name=with_suffix(below.name, target.platform), platform=target.platform)
    if (other := bases.setdefault(made.name, made)) != made:
        what = f"its base '{made.name}' for {made.platform} is already defined at {other.where}"
        faults.append(Diagnostic("duplicate-base", str(target.where), what, "rename one of them"))
    return replace(target, base=made.name)


def _on_system(
    target: Target, recipe: Recipe, row: MatrixRow, bases: dict[str, Base], faults: list[Diagnostic]
) -> Target:
    """The target on its base with the packages of Debian that its recipe adds, a base of its own name."""
    below = bases.get(target.base) or row.own_base
    if not recipe.system or below is None:
        return target
    if below.image:
        what = f"{below.name} is an image of a registry, and 'system' requires a base of Debian packages"
        write = "remove them, or choose another base"
        faults.append(Diagnostic("base-not-debian", str(place_of(row, "system")), what, write))
    packages = tuple(dict.fromkeys((*below.packages, *recipe.system)))
    where, name = place_of(row, "system"), f"{below.name}-{recipe.family}"
    made = replace(below, name=name, packages=packages, where=where, on=below.name)
    if (other := bases.setdefault(name, made)) != made:
        what = f"its base '{name}' is already defined at {other.where}"
        faults.append(Diagnostic("duplicate-base", str(where), what, "rename one of them"))
    return replace(target, base=name)


def _framework_requirement(recipe: Recipe, row: MatrixRow) -> str:
    """The framework at the row's version; from the channel that a constraint names for it.

    Under strict priority only a requirement can ask for a package of a later channel.
    """
    if recipe.source == "conda":
        specs = (parse_spec(text) for text in row.constraints)
        channel = next((spec.channel for spec in specs if spec.name == row.framework), "")
        return str(Spec(name=row.framework, version=f"{row.version}.*", channel=channel))
    extras = f"[{','.join(row.extras)}]" if row.extras else ""
    return f"{row.framework}{extras}=={row.version}.*"


def _all_virtual(target: Target, row: MatrixRow, glibc: str) -> tuple[tuple[str, str], ...]:
    """Conda's virtual packages: what is written, else the oldest machine that the target is for."""
    if not target.conda:
        return ()
    found = {"glibc": glibc, "archspec": MACHINES[target.platform]} | dict(row.virtual)
    if target.source == "conda" and target.gpu:  # without a driver conda has no package __cuda
        found = {"cuda": target.cuda} | found
    return tuple(sorted((f"__{key}", value) for key, value in found.items()))


def _build_on(
    waiting: list[tuple[Recipe, MatrixRow]],
    targets: list[Target],
    bases: dict[str, Base],
    faults: list[Diagnostic],
) -> None:
    """Appends the targets that are built on others, which may be built on others in their turn."""
    made = {target.name: target for target in targets}
    while ready := [pair for pair in waiting if pair[1].on in made]:
        waiting = [pair for pair in waiting if pair[1].on not in made]
        for recipe, row in ready:
            faults += [*addition_faults(row, made[row.on]), *origin_faults(row, made[row.on])]
            target = _on_system(_target_on(recipe, row, made[row.on]), recipe, row, bases, faults)
            faults += exclude_faults(row, target)
            targets.append(target)
            made.setdefault(target.name, target)
    for recipe, row in waiting:
        chain = _waits_for(recipe, row, waiting)
        if not chain:
            others = {name: one.family for name, one in made.items() if one.family != recipe.family}
            hint = suggest(row.on, others) or "choose a target that has a source"
            what = f"no target '{row.on}'"
            faults.append(Diagnostic("parent-unknown", str(place_of(row, "on")), what, hint))
        elif chain[-1] == recipe.family:
            round_trip = " -> ".join((recipe.family, *chain))
            what = f"'{recipe.family}' is built on itself: {round_trip}"
            write = "choose a target that has a source"
            faults.append(Diagnostic("parent-cycle", str(place_of(row, "on")), what, write))


def _waits_for(recipe: Recipe, row: MatrixRow, waiting: Sequence[tuple[Recipe, MatrixRow]]) -> list[str]:
    """The families that a row waits for, the nearest first: up to itself, a circle, or what is missing."""
    chain: list[str] = []
    while True:
        below = [pair for pair in waiting if row.on.startswith(f"{pair[0].family}-")]
        if not below:
            return chain
        found, row = max(below, key=lambda pair: len(pair[0].family))
        again = found.family in chain
        chain.append(found.family)
        if again or found.family == recipe.family:
            return chain


def _target_on(recipe: Recipe, row: MatrixRow, under: Target) -> Target:
    def with_own(theirs: tuple[str, ...], own: tuple[str, ...], kind: str) -> tuple[str, ...]:
        allowed = [text for text in own if RULES[REQUIREMENT_RULES[kind][0]].allows(text)]
        return tuple(dict.fromkeys((*theirs, *(normal_requirement(text, kind) for text in allowed))))

    return replace(
        under,
        name=recipe.family + under.name.removeprefix(under.family),
        family=recipe.family,
        description=row.description or recipe.description,
        capabilities=row.capabilities or under.capabilities,
        checks=row.checks or under.checks,
        requirements=with_own(under.requirements, row.packages, under.source),
        constraints=with_own(under.constraints, row.constraints, under.source),
        environment=tuple((dict(under.environment) | dict(row.environment)).items()),
        pip=with_own(under.pip, row.pip, "pypi"),
        where=row.where,
        on=under.name,
        waive=row.waive or under.waive,
        labels=tuple((dict(under.labels) | dict(recipe.labels) | dict(row.labels)).items()),
        files=(*under.files, *recipe.files),
        start=_start_on(recipe.start, under.start),
        origins=tuple(sorted((dict(row.origins) | dict(under.origins)).items())),
        sources=tuple(text for _, text in row.sources),
        exclude=tuple(dict.fromkeys((*under.exclude, *row.exclude))),
    )


def _start_on(own: Start, under: Start) -> Start:
    """What is said anew holds; another entry point takes no command of the one below, as docker has it."""
    return Start(
        entrypoint=own.entrypoint or under.entrypoint,
        command=own.command or (() if own.entrypoint else under.command),
        workdir=own.workdir or under.workdir,
        user=own.user or under.user,
    )


def _unique(targets: Iterable[Target], faults: Iterable[Diagnostic]) -> tuple[Target, ...]:
    """The targets, unless there are faults or two of one name."""
    all_faults = list(dict.fromkeys(faults))  # rows that inherit a fault tell it once
    first: dict[str, Target] = {}
    for target in targets:
        if (other := first.setdefault(target.name, target)) is not target:
            what = f"target '{target.name}' is also defined at {other.where}"
            all_faults.append(Diagnostic("duplicate-target", str(target.where), what, "remove one of them"))
    if all_faults:
        raise RecipeError(all_faults)
    return tuple(first.values())
