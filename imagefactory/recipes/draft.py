"""From what an environment asks for to the text of a recipe that parses and expands.

Pure. What the file leaves open and a recipe must say (which framework, which version, which CUDA) is asked
of the person, never guessed; what is decided here instead is told with all that was left out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from imagefactory.errors import RecipeError, UsageError
from imagefactory.gpu import knowledge
from imagefactory.model import Base, Target
from imagefactory.recipes.expand import expand_all
from imagefactory.recipes.framework_row import FRAMEWORKS, Row, find_framework, fits_python, pypi_name
from imagefactory.recipes.index_rows import index_rows
from imagefactory.recipes.match_spec import channel_address, channel_name, parse_spec
from imagefactory.recipes.model import Recipe
from imagefactory.recipes.recipe import parse_recipe
from imagefactory.recipes.values import RULES, default_checks
from imagefactory.recipes.wish import INSTEAD, Wish, minor_python
from imagefactory.recipes.yaml_tree import show
from imagefactory.suite import table
from imagefactory.versions import natural

_NEWEST_PYTHON = 14


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftAsk:
    """What the person says beside the file, empty where the file is to say it; and the settings' indexes."""

    family: str
    framework: str = ""
    version: str = ""
    cuda: str = ""
    source: str = ""
    indexes: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """A recipe's text, and what a person must know of it: what was left out, decided or rewritten."""

    text: str
    told: tuple[str, ...]


def draft(wish: Wish, asked: DraftAsk, bases: Sequence[Base], targets: Sequence[Target] = ()) -> Draft:
    """A recipe for the environment of `wish`. `targets` are those that it could be built on as well.

    Raises UsageError with the options to add where neither file nor person says what a recipe must.
    """
    framework, source = find_framework(wish, asked.framework, asked.source)
    told = [*wish.notes, *wish.left]
    if wish.locked:
        told.append("every package was written at its locked version (loosen what may be newer)")
    row = Row(framework=framework, source=source, wish=wish)
    if source == "conda":
        row = _from_conda(row, told)
        wish = row.wish
    version = asked.version or row.version
    elsewhere = index_rows(wish, dict(asked.indexes))
    if not asked.cuda:
        row.refuse_rocm()
        if framework not in elsewhere.rows:
            row.refuse_other_build(version, targets, index=elsewhere.missing.get(framework, ""))
    cuda = asked.cuda or (row.told_cuda() if framework in elsewhere.rows else row.cuda(version))
    told += elsewhere.notes
    for package, write in elsewhere.missing.items():
        if package != framework:
            told.append(
                f"{package}: PyPI has no wheel of what is asked for ({write}, and run this command again)"
            )
    if not version or not cuda:
        raise row.ask(version, cuda, targets)
    if row.other_below(cuda):
        told.append(f"CUDA {wish.below} of the image below: {framework} {version} brings CUDA {cuda} itself")
    base, python = _python(wish, source, bases, told)
    common = {
        "family": asked.family,
        "description": _description(f"{framework} and what {wish.file} asks for"),
        "source": source,
        "framework": framework,
    }
    if source == "conda":
        channels = [*wish.channels]
        if INSTEAD not in channels and (wish.defaults or not channels):
            after = "asked last, where conda asks its defaults" if channels else "no other channel is named"
            told.append(f"the channel {INSTEAD} was written: {after}")
            channels.append(INSTEAD)
        common["channels"] = f"[{', '.join(map(quoted, channels))}]"
    lists = _conda_lists(row, told) if source == "conda" else _pypi_lists(row, cuda, told)
    if source == "conda" and asked.cuda and not row.told_cuda() and framework in FRAMEWORKS:
        packages, constraint = _builds_for(row, version, cuda)
        lists["packages"] = [*lists["packages"], packages]
        lists["constraints"] = [*lists.get("constraints", ()), constraint]
        told.append(f"{packages} and {constraint} were added: without them a solver may take builds for CPUs")
    capabilities = ("8.0", "9.0") if natural(cuda) >= natural("11.8") else ("8.0",)
    parts = [
        _head(wish, told),
        *(f"{key}: {value}\n" for key, value in common.items()),
        f'platform: linux/amd64\nbase: {base.name}\npython: "{python}"\n',
        "\n# The compute capabilities that every image of this family must support.\n",
        f"capabilities: [{', '.join(quoted(value) for value in capabilities)}]\n",
    ]
    if framework not in table.FRAMEWORKS:
        parts.append(f"# What can be checked of any package; {framework} has no checks of its own.\n")
        parts.append(f"checks: [{', '.join(default_checks(framework))}]\n")
    parts.append("\n")
    parts += [_list(key, values) for key, values in lists.items()]
    parts.append(_index(elsewhere.rows, {framework, *map(pypi_name, lists.get("pip", lists["packages"]))}))
    parts += [_labels(wish), _environment(wish), _parts(wish)]
    parts.append(f'\nmatrix:\n  - version: "{version}"\n    cuda: ["{cuda}"]\n')
    if extras := row.extras(version, cuda):
        parts.append(f"    extras: [{', '.join(extras)}]\n")
    return Draft(text="".join(parts), told=tuple(told))


def draft_on(wish: Wish | None, family: str, target: Target) -> Draft:
    """A recipe that adds what `wish` asks for to `target`; with no wish one to fill in."""
    told = [*wish.notes, *wish.left] if wish else []
    wish = wish or Wish(file="more")
    conda = target.source == "conda"
    lists: dict[str, list[str]] = {"packages": [], "pip": []}
    for text in wish.conda:
        spec, channels = parse_spec(text), target.channels
        if spec.name == target.framework:
            told.append(_comes_from(text, target))
        elif not conda:
            told.append(
                f"{text}: {target.name} takes its packages from PyPI (add PyPI's name of it, if it is needed)"
            )
        elif spec.channel and spec.channel not in channels:
            told.append(
                f"{text}: {target.name} has no channel {channel_name(spec.channel)} (take it from another)"
            )
        else:
            lists["packages"].append(text)
    for text in wish.pip:
        if pypi_name(text) in (target.framework, FRAMEWORKS.get(target.framework)):
            told.append(_comes_from(text, target))
        else:
            lists["pip" if conda else "packages"].append(text)
    more = [name for name in wish.channels if channel_address(name) not in target.channels]
    if conda and more:
        told.append(f"the channels {', '.join(more)}: those of {target.name} are asked alone")
    if wish.constraints:
        told.append(f"{', '.join(wish.constraints)}: {target.name} keeps its own (write what must hold)")
    if not fits_python(target.python, wish.python):
        told.append(f"Python {wish.python}: {target.name} has Python {target.python}")
    if not lists["pip"]:
        del lists["pip"]
    text = (
        _head(wish, told)
        + f"family: {family}\ndescription: {_description(f'{wish.file} on {target.name}')}\n"
        + f"on: {target.name}    # its framework, CUDA, Python, base and packages, each as locked\n\n"
        + "".join(_list(key, values) for key, values in lists.items())
        + _labels(wish)
        + _environment(wish)
        + _parts(wish)
    )
    return Draft(text=text, told=tuple(told))


def check_draft(
    text: str, family: str, recipes: Iterable[Recipe], bases: Sequence[Base]
) -> tuple[Target, ...]:
    """The targets that a draft would add. Raises RecipeError where it does not expand among `recipes`."""
    try:
        recipe = parse_recipe(text, f"recipes/{family}.yaml")
        made = expand_all([*recipes, recipe], bases)
    except RecipeError as error:
        raise RecipeError(
            error.faults, hint="change the options, or write what --print shows into a recipe and mend it"
        ) from error
    return tuple(target for target in made if target.family == recipe.family)


# --- its Python ---------------------------------------------------------------------------------


def _python(wish: Wish, source: str, bases: Sequence[Base], told: list[str]) -> tuple[Base, str]:
    """A base, and the environment's Python: the file's where it can be, else the base's."""
    fitting = [base for base in bases if base.python or source == "conda"]
    if not fitting:
        raise UsageError("there is no base to build on", hint="add one to recipes/bases.yaml")
    wanted = [base.python for base in fitting if base.python]
    wanted += [f"3.{minor}" for minor in range(_NEWEST_PYTHON, 5, -1)]
    python = next((python for python in wanted if fits_python(python, wish.python)), "")
    base = next((base for base in fitting if base.python == python), fitting[0])
    if python:
        if not minor_python(wish.python):
            told.append(f"Python {python} was written: {wish.file} leaves it open")
        if source != "conda" and base.python != python:
            told.append(f"Python {python} comes from conda-forge: no base carries it")
        return base, python
    told.append(f"Python {base.python} was written: {wish.file} asks for {wish.python}, which is not known")
    return base, base.python or "3.12"


# --- its packages --------------------------------------------------------------------------------


def _from_conda(row: Row, told: list[str]) -> Row:
    """The same where the file is one of pip's: what goes with the framework comes from conda as well."""
    own = FRAMEWORKS.get(row.framework, "")
    wish, beside = row.wish, knowledge.companion_names(own)
    named = {spec.name: spec for spec in map(parse_spec, wish.conda)}
    if row.framework == "jaxlib" and "jaxlib" not in named and (jax := named.get("jax")):
        told.append(f"jaxlib was written beside {jax}: it has the code for GPUs")
        wish = replace(wish, conda=[*wish.conda, str(replace(jax, name="jaxlib"))])
    if wish.conda or wish.channels:
        return replace(row, wish=wish)
    pinned = next((text for text in wish.pip if pypi_name(text) == own), "")
    bounds = pinned.rpartition("]")[2].removeprefix(own) if pinned else ""
    moved = [text for text in wish.pip if pypi_name(text) in beside and RULES["match spec"].allows(text)]
    if moved:
        told.append(f"{', '.join(moved)}: taken from conda too, to go with {row.framework}")
    conda = [str(parse_spec(text)) for text in (f"{row.framework}{bounds}", *moved)]
    return replace(row, wish=replace(wish, conda=conda, pip=[one for one in wish.pip if one not in moved]))


def _conda_lists(row: Row, told: list[str]) -> dict[str, list[str]]:
    wish, specs = row.wish, row.specs
    constraints = [str(replace(spec, version="")) for spec in specs if spec.build or spec.channel]
    if more := [str(spec) for spec in specs if spec.version not in ("", specs[0].version)]:
        told.append(f"{', '.join(more)}: the row's version says it")
    if re.fullmatch(r"(==)?3\.[0-9]+\.[0-9]+.*", wish.python):
        constraints.append(f"python {wish.python}")
    constraints += wish.conda_bounds
    same = FRAMEWORKS.get(row.framework, "")
    for text in wish.pip:
        if same and pypi_name(text) == same:
            told.append(f"{text} of PyPI: the framework comes from conda, as {row.framework}")
    if wish.constraints:
        what = ", ".join(wish.constraints)
        told.append(f"{what}: these bound what comes from PyPI alone (write them under pip)")
    lists = {
        "packages": [text for text in wish.conda if parse_spec(text).name != row.framework],
        "constraints": constraints,
        "pip": [text for text in wish.pip if not same or pypi_name(text) != same],
    }
    return {key: values for key, values in lists.items() if values or key == "packages"}


def _builds_for(row: Row, version: str, cuda: str) -> tuple[str, str]:
    """The package by which conda's builds for a CUDA are chosen, and the bound on the framework's build.

    Sources: pytorch.org/get-started/previous-versions (the pytorch channel: cudatoolkit up to 1.12, then
    pytorch-cuda); conda-forge.org/docs/user/tipsandtricks, "Installing CUDA-enabled packages" (cuda-version).
    """
    channels = [channel_name(spec.channel) for spec in row.specs if spec.channel] or row.wish.channels
    first = next((name for name in channels if name in ("pytorch", INSTEAD)), INSTEAD)
    name = "cuda-version"
    if first == "pytorch" and FRAMEWORKS[row.framework] == "torch":
        name = "pytorch-cuda" if natural(version) >= natural("1.13") else "cudatoolkit"
    return f"{name} {cuda}.*", f"{row.framework} * *cuda*"


def _pypi_lists(row: Row, cuda: str, told: list[str]) -> dict[str, list[str]]:
    specs = (*row.wish.conda, *row.wish.conda_bounds)
    if left := [text for text in specs if parse_spec(text).name != "pip"]:
        told.append(
            f"{row.framework} comes from PyPI, so these of conda were left out: {', '.join(left)} "
            "(write PyPI's names of those that are needed, or take a framework of conda: --framework NAME)"
        )
    bounds = [text for text in row.wish.constraints if pypi_name(text) != row.framework]
    packages = [text for text in row.wish.pip if pypi_name(text) != row.framework]
    if row.other_cuda(cuda):
        own = [text for text in packages if re.match(r"nvidia-[a-z-]+-cu[0-9]+=|triton=", text)]
        packages = [text for text in packages if text not in own]
        told += [f"{', '.join(own)}: libraries of another CUDA (the framework brings its own)"] if own else []
    lists = {"packages": packages}
    return {**lists, **({"constraints": bounds} if bounds else {})}


def _comes_from(text: str, target: Target) -> str:
    return f"{text}: {target.name} brings {target.framework} {target.version}"


# --- text ----------------------------------------------------------------------------------------


def _head(wish: Wish, told: Sequence[str]) -> str:
    lines = ["# yaml-language-server: $schema=recipe.schema.json"]
    if told:
        lines.append(f"# From {show(wish.file)[1:-1]}. What was left out or decided on the way:")
        lines += [f"#   {re.sub('[^ -~]', '?', line)}" for line in told]
    return "\n".join(lines) + "\n"


def _description(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9 .,;()/+_=-]", "_", text)[:200].strip(" _")


def _list(key: str, values: Sequence[str]) -> str:
    if not values:
        return f"{key}: []\n"
    return f"{key}:\n" + "".join(f"  - {quoted(value)}\n" for value in dict.fromkeys(values))


def _index(rows: Mapping[str, str], names: Collection[str]) -> str:
    """The indexes of those packages that the recipe asks for itself."""
    lines = [f"  {quoted(package)}: {index}\n" for package, index in rows.items() if package in names]
    return "index:\n" + "".join(lines) if lines else ""


def _labels(wish: Wish) -> str:
    """Their values may hold quotes."""
    if not wish.labels:
        return ""
    return "labels:\n" + "".join(
        f"  {quoted(name)}: '{value.replace(chr(39), chr(39) * 2)}'\n" for name, value in wish.labels.items()
    )


def _environment(wish: Wish) -> str:
    if not wish.environment:
        return ""
    lines = [f'  {name}: "{value}"\n' for name, value in wish.environment.items()]
    return "environment:\n" + "".join(lines)


def _parts(wish: Wish) -> str:
    """What a container file says of its image."""
    parts = wish.parts
    lines = [_list("system", parts.debian)] if parts.debian else []
    lines += [f'{key}: "{value}"\n' for key in ("workdir", "user") if (value := getattr(parts, key))]
    for key in ("entrypoint", "command"):
        if words := getattr(parts, key):
            lines.append(f"{key}: [{', '.join(json.dumps(word) for word in words)}]\n")
    return "".join(lines)


def quoted(text: str) -> str:
    """A value of a list as YAML keeps it text; no rule allows a quote or a backslash."""
    words = {"y", "n", "yes", "no", "on", "off", "true", "false", "null"}
    plain = re.fullmatch(r"[a-z_][a-z0-9_./-]*( ?[=<>!~][A-Za-z0-9.*=<>!~_]*)?", text)
    return text if plain and text not in words else f'"{text}"'
