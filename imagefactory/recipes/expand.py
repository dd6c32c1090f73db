"""Recipe -> Target: each row of a matrix becomes its targets, also those that are built on others. Pure.

What a recipe alone cannot show is judged here: its base, what its source offers, the target below.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from imagefactory.errors import NothingSelectedError, RecipeError
from imagefactory.gpu import knowledge
from imagefactory.model import Base, Start, Target, Where
from imagefactory.recipes.bases import all_bases
from imagefactory.recipes.match_spec import Spec, parse_spec
from imagefactory.recipes.model import MatrixRow, Recipe
from imagefactory.recipes.names import Known, choose_name, choose_names, suggest
from imagefactory.recipes.origins import origin_faults
from imagefactory.recipes.values import (
    ARCHSPECS,
    REQUIREMENT_RULES,
    RULES,
    Source,
    check_fault,
    normal_requirement,
    requirement_fault,
)
from imagefactory.recipes.yaml_tree import show
from imagefactory.versions import natural, nearest


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
    recipes: Iterable[Recipe], bases: Sequence[Base], faults: Mapping[str, tuple[str, ...]]
) -> tuple[tuple[Base, ...], tuple[Target, ...], tuple[str, ...]]:
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
                if own := tuple(f for f in error.faults if f.startswith(f"{recipe.where.file}:")):
                    waiting[recipe.family] = own
            if not waiting:
                raise
        told |= waiting
        sound = [recipe for recipe in sound if recipe.family not in told]


def _waits(recipe: Recipe, families: Sequence[str], told: Mapping[str, object]) -> Iterator[str]:
    for row in recipe.matrix:
        owners = [family for family in families if row.on.startswith(f"{family}-")]
        if owners and (owner := max(owners, key=len)) in told:
            yield f"{_place(row, 'on')}: the recipe of '{row.on}' has faults (mend {owner}.yaml)"


def select(targets: Sequence[Target], names: Sequence[str]) -> tuple[Target, ...]:
    """The targets that `names` ask for (names, beginnings, families or patterns); all when empty.

    Raises NothingSelectedError for a name that fits no target, UsageError for one that begins several.
    """
    if base := next((name for name in names if name.startswith("base:")), ""):
        raise NothingSelectedError(
            f"there is no target {show(base)}",
            hint="a base is made with the first target on it, and locked by `imagefactory lock base:NAME`",
        )
    chosen = choose_names(names, _known(targets))
    return tuple(target for target in targets if target.name in chosen)


def select_one(targets: Sequence[Target], name: str) -> Target:
    """The one target of `name`. Raises UsageError for what fits several."""
    (chosen,) = select(targets, (choose_name(name, _known(targets)),))
    return chosen


def _known(targets: Iterable[Target]) -> Known:
    return {target.name: target.family for target in targets}


def _expand(recipes: Iterable[Recipe], bases: dict[str, Base]) -> tuple[list[Target], list[str]]:
    """Targets and faults; `bases`, by name, gets those of bases and packages that recipes add to them."""
    targets = []
    faults: list[str] = []
    above = []
    for recipe in recipes:
        for row in recipe.matrix:
            if row.on:
                above.append((recipe, row))
                continue
            base = row.own_base or bases.get(row.base)
            faults += _base_faults(recipe, row, base, tuple(bases))
            for platform in row.platforms:
                for index, cuda in enumerate(row.cuda):
                    if recipe.source == "conda":
                        faults += _virtual_faults(row, index, base)
                    else:
                        faults += _source_faults(recipe, row, index)
                    target = _target(recipe, row, cuda, platform)
                    glibc = base.glibc if base else ""
                    target = replace(target, virtual=_all_virtual(recipe, row, cuda, glibc))
                    targets.append(_on_system(target, recipe, row, bases, faults))
    _build_on(above, targets, bases, faults)
    return targets, faults


def _target(recipe: Recipe, row: MatrixRow, cuda: str, platform: str) -> Target:
    name = f"{recipe.family}-{row.version}-cu{cuda.replace('.', '')}"
    if row.python != recipe.python:
        name += f"-py{row.python.replace('.', '')}"
    if platform != recipe.platform:
        name += f"-{platform.rpartition('/')[2]}"
    return Target(
        name=name,
        family=recipe.family,
        description=recipe.description,
        source=recipe.source,
        framework=recipe.framework,
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
        labels=recipe.labels,
        files=recipe.files,
        start=recipe.start,
        origins=row.origins,
    )


def _on_system(
    target: Target, recipe: Recipe, row: MatrixRow, bases: dict[str, Base], faults: list[str]
) -> Target:
    """The target on its base with the packages of Debian that its recipe adds, a base of its own name."""
    below = row.own_base or bases.get(target.base)
    if not recipe.system or below is None:
        return target
    if below.image:
        faults.append(
            f"{_place(row, 'system')}: {below.name} is an image of a registry, and these are added to bases "
            "of Debian's packages (take them out, or write another base)"
        )
    packages = tuple(dict.fromkeys((*below.packages, *recipe.system)))
    where, name = _place(row, "system"), f"{below.name}-{recipe.family}"
    made = replace(below, name=name, packages=packages, where=where, on=below.name)
    if (other := bases.setdefault(name, made)) != made:
        faults.append(f"{where}: its base would be '{name}', which is at {other.where} (rename one of them)")
    return replace(target, base=name)


def _framework_requirement(recipe: Recipe, row: MatrixRow) -> str:
    """The framework at the row's version; from the channel that a constraint names for it.

    Under strict priority only a requirement can ask for a package of a later channel.
    """
    if recipe.source == "conda":
        specs = (parse_spec(text) for text in row.constraints)
        channel = next((spec.channel for spec in specs if spec.name == recipe.framework), "")
        return str(Spec(name=recipe.framework, version=f"{row.version}.*", channel=channel))
    extras = f"[{','.join(row.extras)}]" if row.extras else ""
    return f"{recipe.framework}{extras}=={row.version}.*"


def _all_virtual(recipe: Recipe, row: MatrixRow, cuda: str, glibc: str) -> tuple[tuple[str, str], ...]:
    """Conda's virtual packages: what is written, else the oldest machine that the target is for."""
    if recipe.source != "conda":
        return ()
    found = {"cuda": cuda, "glibc": glibc, "archspec": ARCHSPECS[0]} | dict(row.virtual)
    return tuple(sorted((f"__{key}", value) for key, value in found.items()))


def _build_on(
    waiting: list[tuple[Recipe, MatrixRow]],
    targets: list[Target],
    bases: dict[str, Base],
    faults: list[str],
) -> None:
    """Appends the targets that are built on others, which may be built on others in their turn."""
    made = {target.name: target for target in targets}
    while ready := [pair for pair in waiting if pair[1].on in made]:
        waiting = [pair for pair in waiting if pair[1].on not in made]
        for recipe, row in ready:
            faults += [*_addition_faults(row, made[row.on]), *origin_faults(row, made[row.on])]
            target = _on_system(_target_on(recipe, row, made[row.on]), recipe, row, bases, faults)
            targets.append(target)
            made.setdefault(target.name, target)
    for recipe, row in waiting:
        chain = _waits_for(recipe, row, waiting)
        if not chain:
            others = {name: one.family for name, one in made.items() if one.family != recipe.family}
            hint = suggest(row.on, others) or "name a target that has a source of its own"
            faults.append(f"{_place(row, 'on')}: there is no target '{row.on}' ({hint})")
        elif chain[-1] == recipe.family:
            round_trip = " -> ".join((recipe.family, *chain))
            faults.append(
                f"{_place(row, 'on')}: '{recipe.family}' is built on itself: {round_trip} "
                "(name a target that has a source of its own)"
            )


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
        description=recipe.description,
        capabilities=row.capabilities or under.capabilities,
        checks=row.checks or under.checks,
        requirements=with_own(under.requirements, row.packages, under.source),
        constraints=with_own(under.constraints, row.constraints, under.source),
        environment=tuple((dict(under.environment) | dict(row.environment)).items()),
        pip=with_own(under.pip, row.pip, "pypi"),
        where=row.where,
        on=under.name,
        waive=row.waive or under.waive,
        labels=tuple((dict(under.labels) | dict(recipe.labels)).items()),
        files=(*under.files, *recipe.files),
        start=_start_on(recipe.start, under.start),
        origins=tuple(sorted((dict(row.origins) | dict(under.origins)).items())),
    )


def _start_on(own: Start, under: Start) -> Start:
    """What is said anew holds; another entry point takes no command of the one below, as docker has it."""
    return Start(
        entrypoint=own.entrypoint or under.entrypoint,
        command=own.command or (() if own.entrypoint else under.command),
        workdir=own.workdir or under.workdir,
        user=own.user or under.user,
    )


def _addition_faults(row: MatrixRow, under: Target) -> Iterator[str]:
    """What the source of the target below does not take."""
    source = Source(kind=under.source, framework=under.framework, channels=under.channels, on=under.name)
    for key, rule in zip(("packages", "constraints"), REQUIREMENT_RULES[under.source], strict=True):
        for index, text in enumerate(getattr(row, key)):
            fault = requirement_fault(text, key, source)
            if not RULES[rule].allows(text):
                what = f"'{key}' of {under.source}, as {under.name} is, cannot be {show(text)}"
                fault = what, f"write {RULES[rule].write}"
            if fault:
                yield f"{_place(row, f'{key}.{index}')}: {fault[0]} ({fault[1]})"
    for check in row.checks:
        if fault := check_fault(check, under.framework):
            yield f"{_place(row, f'checks.{check}')}: {fault[0]} ({fault[1]})"
    if row.pip and under.source != "conda":
        yield (
            f"{_place(row, 'pip.0')}: all packages of {under.name} are PyPI's: there is no 'pip' beside them "
            "(write these under 'packages')"
        )


def _base_faults(recipe: Recipe, row: MatrixRow, base: Base | None, names: Sequence[str]) -> Iterator[str]:
    if base is None:
        near = nearest(row.base, names)
        hint = f"did you mean '{near}'?" if near else f"the bases are {', '.join(names) or 'none yet'}"
        yield f"{_place(row, 'base')}: there is no base '{row.base}' ({hint})"
    elif recipe.source == "conda":  # brings its own Python
        return
    elif not base.python:
        yield (
            f"{_place(row, 'base')}: base '{base.name}' carries no Python "
            "(write a base that does, or python: beside it in bases.yaml)"
        )
    elif base.python != row.python:
        yield (
            f"{_place(row, 'python')}: base '{base.name}' carries Python {base.python}, not {row.python} "
            f'(write "{base.python}", or another base)'
        )


def _virtual_faults(row: MatrixRow, index: int, base: Base | None) -> Iterator[str]:
    """What no machine has, or none that the image is for."""
    cuda, virtual = row.cuda[index], dict(row.virtual)
    driver, newest = virtual.get("cuda") or cuda, knowledge.newest_cuda()
    place = _place(row, "virtual.cuda" if "cuda" in virtual else f"cuda.{index}")
    if "." not in driver:
        yield (
            f"{place}: CUDA {cuda} leaves open which drivers the packages may count on "
            f'(write virtual: {{cuda: "{cuda}.4"}} with the oldest that the image is for)'
        )
    elif int(driver.partition(".")[0]) > newest or not RULES["driver"].allows(driver):
        yield f"{place}: no driver is known for CUDA {driver} (write a version of CUDA {newest} or older)"
    elif natural(driver.partition(".")[0]) < natural(cuda.partition(".")[0]):
        yield (
            f"{place}: a driver for CUDA {driver} runs nothing of CUDA {cuda} "
            f"(write a version of CUDA {cuda.partition('.')[0]}, or leave it out)"
        )
    if base and "glibc" in virtual and natural(virtual["glibc"]) > natural(base.glibc):
        yield (
            f"{_place(row, 'virtual.glibc')}: base '{base.name}' carries glibc {base.glibc}, older than "
            f'{virtual["glibc"]} (write "{base.glibc}" or less, or leave it out)'
        )


def _source_faults(recipe: Recipe, row: MatrixRow, index: int) -> Iterator[str]:
    """What the source is known not to offer. A version that the table lacks is left to the solver."""
    cuda, name = row.cuda[index], f"{recipe.framework} {row.version}"
    wheels = knowledge.offered(recipe.framework, row.version)
    if not wheels or recipe.framework in dict(row.origins):  # of PyPI's alone it is known
        return
    fitting = [wheel for wheel in wheels if wheel.cuda == cuda]
    if not fitting:
        known = sorted({wheel.cuda for wheel in wheels}, key=natural)
        offers = " and ".join(known)
        write = " or ".join(f'"{version}"' for version in known)
        place = _place(row, f"cuda.{index}")
        yield f"{place}: {name} on PyPI is built for CUDA {offers}, not {cuda} (write {write})"
        return
    wheel = fitting[0]
    if missing := [extra for extra in wheel.extras if extra not in row.extras]:
        yield (
            f"{_place(row, 'extras')}: {name} on PyPI comes with CUDA {cuda} only through "
            f"{' and '.join(map(repr, missing))} (write extras: [{', '.join(wheel.extras)}])"
        )
    if wheel.python and natural(row.python) < natural(wheel.python):
        yield (
            f"{_place(row, 'python')}: {name} on PyPI needs Python {wheel.python} or newer, not {row.python} "
            "(write a base that carries it)"
        )


def _place(row: MatrixRow, key: str) -> Where:
    return dict(row.places).get(key, row.where)


def _unique(targets: Iterable[Target], faults: Iterable[str]) -> tuple[Target, ...]:
    """The targets, unless there are faults or two of one name."""
    all_faults = list(dict.fromkeys(faults))  # rows that inherit a fault tell it once
    first: dict[str, Target] = {}
    for target in targets:
        if (other := first.setdefault(target.name, target)) is not target:
            all_faults.append(
                f"{target.where}: target '{target.name}' is also made at {other.where} (remove one of them)"
            )
    if all_faults:
        raise RecipeError(all_faults)
    return tuple(first.values())
