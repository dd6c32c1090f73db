"""From what an environment asks for to the text of a recipe that parses and expands.

Pure. What the file leaves open and a recipe must say (which framework, which version, which CUDA) is asked
of the person, never guessed; what is decided here instead is told with all that was left out.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from packaging.specifiers import InvalidSpecifier, SpecifierSet

from imagefactory.errors import RecipeError, UsageError
from imagefactory.gpu import knowledge
from imagefactory.model import Base, Recipe, Target
from imagefactory.recipes.expand import expand_all
from imagefactory.recipes.match_spec import Spec, channel_address, channel_name, parse_spec
from imagefactory.recipes.recipe import parse_recipe
from imagefactory.recipes.values import RULES, SMOKE_CHECKS, canonical, default_checks
from imagefactory.recipes.wish import Wish, minor_python
from imagefactory.recipes.yaml_tree import show
from imagefactory.versions import natural

# A framework's name on conda's channels -> on PyPI. The first that a file names is its framework.
FRAMEWORKS = {
    "pytorch-gpu": "torch",
    "pytorch": "torch",
    "tensorflow-gpu": "tensorflow",
    "tensorflow": "tensorflow",
    "jaxlib": "jax",
}
# Packages whose version is that of CUDA, the surest first.
_CUDA_PACKAGES = (
    "pytorch-cuda",
    "cuda-version",
    "cudatoolkit",
    "cuda-toolkit",
    "cuda",
    "cuda-cudart",
    "cuda-runtime",
)
_NEWEST_PYTHON = 14


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftAsk:
    """What the person says beside the file; empty where the file is to say it."""

    family: str
    framework: str = ""
    version: str = ""
    cuda: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """A recipe's text, and what a person must know of it: what was left out, decided or rewritten."""

    text: str
    told: tuple[str, ...]


def draft(wish: Wish, asked: DraftAsk, bases: Sequence[Base]) -> Draft:
    """A recipe for the environment of `wish`.

    Raises UsageError with the options to add where neither file nor person says what a recipe must.
    """
    framework, source = _framework(wish, asked)
    told = list(wish.left)
    if wish.locked:
        told.append("every package was written at its locked version (loosen what may be newer)")
    row = _Row(framework=framework, source=source, wish=wish)
    version = asked.version or row.version
    cuda = asked.cuda or row.cuda(version)
    missing = [what for what, found in (("version", version), ("CUDA", cuda)) if not found]
    if missing:
        raise UsageError(
            f"{wish.file} does not say which {' and which '.join(missing)} of {framework} it means",
            hint=f"say it: --framework {framework}={version or 'VERSION'} --cuda {cuda or '12.4'}",
        )
    base, python = _python(wish, source, bases, told)
    common = {
        "family": asked.family,
        "description": _description(f"{framework} and what {wish.file} asks for"),
        "source": source,
        "framework": framework,
    }
    if source == "conda":
        channels = wish.channels or ["conda-forge"]
        if not wish.channels:
            told.append(f"{wish.file} names no channel that can be taken over: conda-forge was written")
        common["channels"] = f"[{', '.join(map(quoted, channels))}]"
    lists = _conda_lists(row, told) if source == "conda" else _pypi_lists(row, told)
    capabilities = ("8.0", "9.0") if natural(cuda) >= natural("11.8") else ("8.0",)
    parts = [
        _head(wish, told),
        *(f"{key}: {value}\n" for key, value in common.items()),
        f'platform: linux/amd64\nbase: {base.name}\npython: "{python}"\n',
        "\n# The compute capabilities that every image of this family must support.\n",
        f"capabilities: [{', '.join(quoted(value) for value in capabilities)}]\n",
    ]
    if (checks := default_checks(framework)) != SMOKE_CHECKS:
        parts.append(f"# What can be checked of any package; {framework} has no checks of its own.\n")
        parts.append(f"checks: [{', '.join(checks)}]\n")
    parts.append("\n")
    parts += [_list(key, values) for key, values in lists.items()]
    parts.append(_environment(wish))
    parts.append(f'\nmatrix:\n  - version: "{version}"\n    cuda: ["{cuda}"]\n')
    if extras := row.extras(version, cuda):
        parts.append(f"    extras: [{', '.join(extras)}]\n")
    return Draft(text="".join(parts), told=tuple(told))


def draft_on(wish: Wish | None, family: str, target: Target) -> Draft:
    """A recipe that adds what `wish` asks for to `target`; with no wish one to fill in."""
    told = list(wish.left) if wish else []
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
        if _name(text) in (target.framework, FRAMEWORKS.get(target.framework)):
            told.append(_comes_from(text, target))
        else:
            lists["pip" if conda else "packages"].append(text)
    more = [name for name in wish.channels if channel_address(name) not in target.channels]
    if conda and more:
        told.append(f"the channels {', '.join(more)}: those of {target.name} are asked alone")
    if wish.python and minor_python(wish.python) != target.python:
        told.append(f"Python {wish.python}: {target.name} has Python {target.python}")
    if not lists["pip"]:
        del lists["pip"]
    text = (
        _head(wish, told)
        + f"family: {family}\ndescription: {_description(f'{wish.file} on {target.name}')}\n"
        + f"on: {target.name}    # its framework, CUDA, Python, base and packages, each as locked\n\n"
        + "".join(_list(key, values) for key, values in lists.items())
        + _environment(wish)
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


# --- what the file says of its framework ---------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    """The framework in what a file asks for."""

    framework: str
    source: str
    wish: Wish

    @property
    def specs(self) -> tuple[Spec, ...]:
        """Its match specs among conda's packages, those with a version first; a bare one if there is none."""
        found = [spec for spec in map(parse_spec, self.wish.conda) if spec.name == self.framework]
        return tuple(sorted(found, key=lambda spec: not spec.version)) or (Spec(name=self.framework),)

    @property
    def requirement(self) -> str:
        """Its requirement among PyPI's."""
        return next((text for text in self.wish.pip if _name(text) == self.framework), self.framework)

    @property
    def version(self) -> str:
        """`2.3` or `2.3.1`; empty where the file leaves it open."""
        if self.source == "conda":
            return _release(self.specs[0].version)
        return _release(self.requirement.removeprefix(self.framework).rpartition("]")[2])

    def cuda(self, version: str) -> str:
        """The CUDA that packages beside it, its build, its channels or its wheels tell; empty for none."""
        offers = sorted({wheel.cuda for wheel in knowledge.offered(self.framework, version)})
        if self.source == "pypi" and version and len(offers) == 1:
            return offers[0]
        specs = {spec.name: spec for spec in map(parse_spec, self.wish.conda)}
        words = [specs[name].version for name in _CUDA_PACKAGES if name in specs]
        words += re.findall(r"(?<=nvidia-cuda-runtime-cu)[0-9]{2}(==[0-9.]+)", " ".join(self.wish.pip))
        for word in words:
            if found := re.match(r"(?:==|~=)?([0-9]+\.[0-9])", word):
                return self._as_offered(found[1], offers)
        for word in (*(spec.build for spec in self.specs), *self.wish.channels, *self.wish.hints):
            if found := re.search(r"cuda-?([0-9]{2})\.([0-9])|cu(?:da)?([0-9]{2})([0-9])(?![0-9])", word):
                return self._as_offered(f"{found[1] or found[3]}.{found[2] or found[4]}", offers)
        return ""

    def _as_offered(self, cuda: str, offers: Sequence[str]) -> str:
        """`12` where PyPI's wheels bind only the major version."""
        major = cuda.partition(".")[0]
        return major if self.source == "pypi" and major in offers else cuda

    def extras(self, version: str, cuda: str) -> tuple[str, ...]:
        """Its own extras, and those without which its CUDA libraries do not come."""
        if self.source == "conda":
            return ()
        written = re.findall(r"\[([^\]]*)\]", self.requirement)
        own = {canonical(extra.strip()) for extra in (written[0].split(",") if written else ())}
        for wheel in knowledge.offered(self.framework, version):
            own |= {*wheel.extras} if wheel.cuda == cuda else set()
        return tuple(sorted(own))


def _framework(wish: Wish, asked: DraftAsk) -> tuple[str, str]:
    """The framework's name and its source."""
    conda, pip = {parse_spec(text).name for text in wish.conda}, {_name(text) for text in wish.pip}
    named = asked.framework
    if named and named.lower() in conda:
        return named.lower(), "conda"
    if named and canonical(named) in pip:
        return canonical(named), "pypi"
    if named:
        source = "conda" if wish.channels or wish.conda or not wish.pip else "pypi"
        return (named.lower() if source == "conda" else canonical(named)), source
    for name in FRAMEWORKS:
        if name in conda:
            return name, "conda"
    for name in knowledge.families().values():
        if name in pip:
            return name, "pypi"
    raise UsageError(
        f"{wish.file} names no framework that the smoke test knows",
        hint="say which of its packages the image is for: --framework NAME, or build it --on TARGET",
    )


def _release(bounds: str) -> str:
    """The version that one pin names, as a recipe's row writes it; empty for a range."""
    found = re.fullmatch(r"(?:==)?([0-9]+(?:\.[0-9]+){1,3})(?:\.\*|[._]?[a-z].*)?", bounds)
    return found[1] if found and RULES["version"].allows(found[1]) else ""


def _python(wish: Wish, source: str, bases: Sequence[Base], told: list[str]) -> tuple[Base, str]:
    """A base, and the environment's Python: the file's where it can be, else the base's."""
    fitting = [base for base in bases if base.python or source == "conda"]
    if not fitting:
        raise UsageError("there is no base to build on", hint="add one to recipes/bases.yaml")
    wanted = [base.python for base in fitting if base.python]
    wanted += [f"3.{minor}" for minor in range(_NEWEST_PYTHON, 5, -1)]
    python = next((python for python in wanted if _fits(python, wish.python)), "")
    base = next((base for base in fitting if base.python == python), fitting[0])
    if python and (source == "conda" or base.python == python):
        if not minor_python(wish.python):
            told.append(f"Python {python} was written: {wish.file} leaves it open")
        return base, python
    told.append(
        f"Python {base.python} was written: {wish.file} asks for {wish.python}, which no base carries"
    )
    return base, base.python or "3.12"


def _fits(python: str, bounds: str) -> bool:
    """Whether some patch version of a Python is within conda's bounds."""
    if not bounds or minor_python(bounds):
        return minor_python(bounds) in ("", python)
    try:
        text = ",".join(f"=={bound}" if bound[0].isdigit() else bound for bound in bounds.split(","))
        return SpecifierSet(text).contains(f"{python}.5")
    except InvalidSpecifier:
        return False


# --- its packages --------------------------------------------------------------------------------


def _conda_lists(row: _Row, told: list[str]) -> dict[str, list[str]]:
    wish, specs = row.wish, row.specs
    constraints = [str(replace(spec, version="")) for spec in specs if spec.build or spec.channel]
    if more := [str(spec) for spec in specs if spec.version not in ("", specs[0].version)]:
        told.append(f"{', '.join(more)}: the row's version says it")
    if re.fullmatch(r"(==)?3\.[0-9]+\.[0-9]+.*", wish.python):
        constraints.append(f"python {wish.python}")
    same = FRAMEWORKS.get(row.framework, "")
    for text in wish.pip:
        if same and _name(text) == same:
            told.append(f"{text} of PyPI: the framework comes from conda, as {row.framework}")
    lists = {
        "packages": [text for text in wish.conda if parse_spec(text).name != row.framework],
        "constraints": constraints,
        "pip": [text for text in wish.pip if not same or _name(text) != same],
    }
    return {key: values for key, values in lists.items() if values or key == "packages"}


def _pypi_lists(row: _Row, told: list[str]) -> dict[str, list[str]]:
    if left := [text for text in row.wish.conda if parse_spec(text).name != "pip"]:
        told.append(
            f"{row.framework} comes from PyPI, so these of conda were left out: {', '.join(left)} "
            "(write PyPI's names of those that are needed, or take a framework of conda: --framework NAME)"
        )
    return {"packages": [text for text in row.wish.pip if _name(text) != row.framework]}


def _comes_from(text: str, target: Target) -> str:
    return f"{text}: {target.name} brings {target.framework} {target.version}"


def _name(requirement: str) -> str:
    return canonical(re.split(r"[ \[<>=!~]", requirement, maxsplit=1)[0])


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


def _environment(wish: Wish) -> str:
    if not wish.environment:
        return ""
    lines = [f'  {name}: "{value}"\n' for name, value in wish.environment.items()]
    return "environment:\n" + "".join(lines)


def quoted(text: str) -> str:
    """A value of a list as YAML keeps it text; no rule allows a quote or a backslash."""
    words = {"y", "n", "yes", "no", "on", "off", "true", "false", "null"}
    plain = re.fullmatch(r"[a-z_][a-z0-9_./-]*( ?[=<>!~][A-Za-z0-9.*=<>!~_]*)?", text)
    return text if plain and text not in words else f'"{text}"'
