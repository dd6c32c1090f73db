"""Add a row to an existing family, after the most similar row, as its maintainer would do.

Values that all rows repeat (packages, bounds, variables) are copied from that row. Values that depend on the
version come from the knowledge tables: CUDA, extras, companions, and the capabilities with code.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from imagefactory.errors import RecipeError, UnknownAnswerError, UsageError
from imagefactory.gpu import knowledge
from imagefactory.gpu.capability import parse_capability
from imagefactory.gpu.values import rocm_of
from imagefactory.model import NO_CUDA, BaseSpec, Target
from imagefactory.recipes.bases import BASES_FILE
from imagefactory.recipes.expand import expand_all
from imagefactory.recipes.family import Recipe, RecipeRow
from imagefactory.recipes.recipe import parse_recipe
from imagefactory.recipes.values import RULES, canonical, default_checks, package_of, quoted
from imagefactory.recipes.yaml_tree import YamlNode, parse_tree, show
from imagefactory.versions import natural, nearest

_Pair: TypeAlias = "tuple[RecipeRow, YamlNode]"
_COPIED_KEYS = ("version", "cuda", "extras", "packages", "constraints", "capabilities", "base", "python")


@dataclass(frozen=True, slots=True, kw_only=True)
class RecipeAddition:
    """A recipe's text with the new `row`, and notes for the reader."""

    text: str
    row: str
    notes: tuple[str, ...]


def add_row(text: str, recipe: Recipe, version: str, cuda: str = "") -> RecipeAddition:
    """Return the `text` of `recipe` with a row for `version`. Everything else is unchanged.

    Without `cuda` it is the CUDA version of the framework's wheels. Raises UsageError if there is no or more
    than one such version, and if the rows of the family are not on one line each.
    """
    file = recipe.where.file
    if recipe.source != "pypi":
        kind = f"built on other targets ({file})" if not recipe.source else f"of {recipe.source} ({file})"
        raise UsageError(
            "add-not-supported",
            f"'{recipe.family}' is {kind}",
            hint="write the row manually: add-version works only for families of PyPI packages",
        )
    if cuda == NO_CUDA or rocm_of(cuda) or not any(map(_for_cuda, recipe.matrix)):
        whose = "AMD GPUs" if rocm_of(cuda) else "CPUs"
        raise UsageError(
            "add-not-supported",
            f"'{recipe.family}': add-version works only with CUDA rows",
            hint=f"write the row for {whose} in {file}",
        )
    cuda = cuda or _cuda(recipe, version)
    if same := next((row for row in recipe.matrix if row.version == version and cuda in row.cuda), None):
        raise UsageError(
            "row-exists",
            f"{same.where}: {recipe.framework} {version} for CUDA {cuda} exists already",
            hint="use another version, or another --cuda",
        )
    root = parse_tree(text, file)
    matrix = root.get("matrix")
    nodes = matrix.items if matrix else []
    every = zip(recipe.matrix, nodes, strict=True)
    pairs = _usual(recipe, [pair for pair in every if _for_cuda(pair[0])], version, cuda)
    nearest_row, node = _nearest(pairs, version, cuda)
    _, before = max(_until(pairs, version) or pairs[:1], key=_order)
    lines = text.split("\n")
    begun = re.match(r"( *)- ", lines[node.where.line - 1])
    if not begun:
        raise UsageError(
            "add-not-supported",
            f"{node.where}: expected each row on its own line, after '- '",
            hint="write the new row manually",
        )
    fields = _fields(root, recipe, nearest_row, node, version, cuda)
    row = [f'{begun[1]}- version: "{version}"', *(f"{begun[1]}  {field}" for field in fields)]
    end = _end(lines, before, nodes, len(begun[1]))
    new = "\n".join([*lines[:end], "", *row, *lines[end:]])
    notes = [f"copied from the row of {nearest_row.version} ({nearest_row.where}): check its bounds"]
    notes += _without(recipe, node, version, nearest_row.python)
    if skipped := [key for key in node.keys if key not in _COPIED_KEYS]:
        notes.append(f"not copied from that row: {', '.join(skipped)}")
    return RecipeAddition(text=new, row="\n".join(row), notes=tuple(notes))


def _for_cuda(row: RecipeRow) -> bool:
    return bool(row.cuda) and NO_CUDA not in row.cuda


def _usual(recipe: Recipe, pairs: list[_Pair], version: str, cuda: str) -> list[_Pair]:
    """Return the rows with a Python that the framework's wheels support, preferably the family's own.

    Rows for only another platform are skipped: their capabilities differ.
    """
    pairs = [pair for pair in pairs if recipe.platform in pair[0].platforms] or pairs
    needs = [wheel.python for wheel in knowledge.offered(recipe.framework, version) if wheel.cuda == cuda]
    fitting = [pair for pair in pairs if natural(pair[0].python) >= natural(max(needs, default=""))]
    same_base = [row for row in fitting if (row[0].base, row[0].python) == (recipe.base, recipe.python)]
    return same_base or fitting or pairs


def _nearest(pairs: list[_Pair], version: str, cuda: str) -> _Pair:
    """Return the nearest row: the last older one with this CUDA major, else a newer one with this CUDA.

    Without both, the last older row.
    """
    older = _until(pairs, version)
    same = [pair for pair in older if _major(pair[0].cuda[-1]) == _major(cuda)]
    newer = [pair for pair in pairs if pair not in older and cuda in pair[0].cuda]
    if same or not newer:
        return max(same or older or pairs[:1], key=_order)
    return min(newer, key=_order)


def _until(pairs: list[_Pair], version: str) -> list[_Pair]:
    return [pair for pair in pairs if natural(pair[0].version) <= natural(version)]


def _order(pair: _Pair) -> Any:
    return natural(pair[0].version), natural(pair[0].cuda[-1])


def _major(cuda: str) -> str:
    return cuda.partition(".")[0]


def _cuda(recipe: Recipe, version: str) -> str:
    offers = sorted({wheel.cuda for wheel in knowledge.offered(recipe.framework, version)}, key=natural)
    if len(offers) == 1:
        return offers[0]
    known = f"comes with CUDA {' and '.join(offers)}" if offers else "has an unknown CUDA version"
    raise UsageError(
        "choice-required",
        f"{recipe.framework} {version} {known}",
        hint=f"choose a CUDA version, such as --cuda {offers[-1] if offers else '12.4'}",
    )


def _fields(
    root: YamlNode, recipe: Recipe, nearest_row: RecipeRow, node: YamlNode, version: str, cuda: str
) -> list[str]:
    """Return the lines of the new row after its version."""
    wheels = [wheel for wheel in knowledge.offered(recipe.framework, version) if wheel.cuda == cuda]
    extras = wheels[0].extras if wheels else nearest_row.extras
    family = _texts(root, "capabilities")
    capabilities = _capabilities(recipe, nearest_row.capabilities, version, cuda)
    lists = {
        "extras": () if tuple(extras) == tuple(_texts(root, "extras")) else extras,
        "packages": _packages(recipe, node, version, nearest_row.python),
        "constraints": _constraints(recipe, node, nearest_row.version),
        "capabilities": () if sorted(family) == sorted(capabilities) else capabilities,
    }
    differs = (recipe.base, recipe.python) != (nearest_row.base, nearest_row.python)
    lines_of_base = (
        [f"base: {nearest_row.base}", f'python: "{nearest_row.python}"']
        if differs and not nearest_row.own_base
        else []
    )
    written = [f"{key}: [{', '.join(map(quoted, values))}]" for key, values in lists.items() if values]
    return [f'cuda: ["{cuda}"]', *lines_of_base, *written]


def _packages(recipe: Recipe, node: YamlNode, version: str, python: str) -> tuple[str, ...]:
    """Return the nearest row's packages, with companions in the series for `version`."""
    known = {row.package: row for row in knowledge.companions(recipe.framework, version, python)}
    ours = knowledge.companion_names(recipe.framework)
    requested = _requested(recipe, node)
    companions = [f"{name}=={row.series}.*" for name, row in known.items() if name in requested]
    others = (text for text in _texts(node, "packages") if package_of(text) not in ours)
    return (*companions, *others)


def _requested(recipe: Recipe, node: YamlNode) -> frozenset[str]:
    """Return the packages of the nearest row, and the words of the family's description."""
    words = re.findall(r"[A-Za-z0-9_-]+", recipe.description)
    return frozenset([*map(canonical, words), *map(package_of, _texts(node, "packages"))])


def _without(recipe: Recipe, node: YamlNode, version: str, python: str) -> Iterator[str]:
    """Yield a message for each requested companion that the new row cannot have."""
    framework = recipe.framework
    series = knowledge.companions_for(framework, version)
    available = {row.package for row in knowledge.companions(framework, version, python)}
    for name in sorted(knowledge.companion_names(framework) & _requested(recipe, node) - available):
        if series.get(name):
            reason = f"{name} {series[name]} has no wheels for Python {python}"
        elif series:
            reason = f"no release of {name} for {framework} {version} is known"
        else:
            reason = f"the companions of {framework} {version} are not known"
        yield f"without {name}: {reason}; if there is one, add it to packages"


def _constraints(recipe: Recipe, node: YamlNode, version: str) -> tuple[str, ...]:
    """Return the nearest row's constraints, without those that depend on its version."""
    releases = (version,) if version.count(".") > 1 else tuple(f"{version}.{n}" for n in range(10))
    known = {
        str(bound.needs)
        for bound in knowledge.bounds()
        if bound.package == recipe.framework
        and not bound.python
        and any(release in bound.versions for release in releases)
    }
    return tuple(text for text in _texts(node, "constraints") if text.replace(" ", "") not in known)


def _capabilities(recipe: Recipe, near: tuple[str, ...], version: str, cuda: str) -> tuple[str, ...]:
    """Return the nearest row's capabilities that the new build is documented for or its toolkit supports."""
    build = knowledge.documented(recipe.framework, version, cuda)
    codes = build.codes if build else knowledge.targets_of(cuda)
    archs = [code.architecture for code in codes if code.architecture]
    if not archs:
        return near
    parsed = [(text, parse_capability(text)) for text in near]
    return tuple(
        text
        for text, capability in parsed
        if any(arch.major == capability.major and arch.minor <= capability.minor for arch in archs)
    )


def _texts(node: YamlNode, key: str) -> tuple[str, ...]:
    values = node.get(key)
    return tuple(item.text for item in values.items) if values else ()


def _end(lines: list[str], node: YamlNode, nodes: list[YamlNode], indent: int) -> int:
    """Return the index of the line after a row. Comments above the next row belong to that one."""
    after = [row.where.line - 1 for row in nodes if row.where.line > node.where.line]
    end = min(after, default=len(lines))
    for index in range(node.where.line, end):
        line = lines[index]
        if line.strip() and not line.lstrip().startswith("#") and len(line) - len(line.lstrip()) <= indent:
            end = index  # a key of the family after the matrix
            break
    while end > node.where.line and (not lines[end - 1].strip() or lines[end - 1].lstrip().startswith("#")):
        end -= 1
    return end


# --- A commented recipe to start from, for a family without an environment file


def scaffold(
    family: str,
    bases: Sequence[BaseSpec],
    bundled: Sequence[Recipe] = (),
    *,
    framework: str = "",
    source: str = "pypi",
) -> RecipeDraft:
    """Return a valid, commented recipe for `family`.

    A framework of a `bundled` recipe gets the newest row of that. Others get their newest known version, from
    PyPI with CUDA and extras. Raises UnknownAnswerError for an unknown framework, and UsageError
    for an invalid name, or if there is no base.
    """
    known = knowledge.families()
    if source == "conda":
        same = known.get(family.removesuffix("-conda"))
        names = (name for name, of_pypi in FRAMEWORKS.items() if of_pypi == same and "-gpu" not in name)
        framework = (framework or next(names, family)).lower()
    else:
        framework = canonical(framework or known.get(family, family))
    check_name(family, "family")
    check_name(framework, "framework")
    if source == "conda":
        return RecipeDraft(text=_conda_scaffold(family, framework, bases))
    recipes = (recipe for recipe in bundled if recipe.source == "pypi" and recipe.framework)
    example = next((recipe for recipe in recipes if framework in (recipe.family, recipe.framework)), None)
    return RecipeDraft(
        text=_pypi_scaffold(family, example.framework if example else framework, bases, example)
    )


def scaffold_on(family: str, target: Target) -> RecipeDraft:
    """Return a recipe that adds packages to a target, with an empty list of packages."""
    text = (
        "# yaml-language-server: $schema=recipe.schema.json\n"
        f"family: {family}\ndescription: more on {target.name}\n"
        f"on: {target.name}    # its framework, CUDA, Python, base and packages, each as locked\n\n"
        "packages: []\n"
    )
    choice = ImageChoice(
        framework=target.framework, version=target.version, cuda=target.cuda, python=target.python
    )
    return RecipeDraft(text=text, choice=choice)


def _conda_scaffold(family: str, framework: str, bases: Sequence[BaseSpec]) -> str:
    if not bases:
        hint = f"add a base to recipes/{BASES_FILE}"
        raise UsageError("no-base", "the project has no base", hint=hint)
    base = next((base for base in bases if base.python), bases[0])
    known = knowledge.families()
    names = (FRAMEWORKS.get(framework, ""), known.get(family.removesuffix("-conda"), ""), framework)
    releases = next((rows for name in names if (rows := knowledge.releases(name))), ())
    if not releases:
        raise _unknown_framework(framework, sorted(FRAMEWORKS))
    return _CONDA_SCAFFOLD.format(
        family=family,
        version=max((row.version for row in releases), key=natural),
        framework=framework,
        base=base.name,
        python=base.python or "3.12",
        checks=", ".join(default_checks(framework)),
    )


def _pypi_scaffold(family: str, framework: str, bases: Sequence[BaseSpec], bundled: Recipe | None) -> str:
    base = next((base for base in bases if base.python), None)
    if base is None:
        hint = f"add a base with python: to recipes/{BASES_FILE}"
        raise UsageError("no-base", "no base of the project has a Python", hint=hint)
    values = {"family": family, "framework": framework, "checks": ", ".join(default_checks(framework))}
    if bundled:
        return _SCAFFOLD.format(**values, **_bundled_values(bundled, bases, base))
    wheels = [
        wheel
        for wheel in knowledge.cuda_wheels()
        if wheel.package == framework and natural(base.python) >= natural(wheel.python)
    ]
    if not wheels:
        raise _unknown_framework(framework, sorted(set(knowledge.families().values())))
    wheel = max(wheels, key=lambda wheel: (natural(wheel.version), natural(wheel.cuda)))
    return _SCAFFOLD.format(
        **values,
        base=base.name,
        python=base.python,
        libraries="with the CUDA libraries from PyPI",
        capabilities=_CAPABILITIES.format('"8.0", "9.0"'),
        known=wheel.source,
        version=wheel.version,
        cuda=f'"{wheel.cuda}"',
        row=f"    extras: [{', '.join(wheel.extras)}]\n" if wheel.extras else "",
    )


def _bundled_values(recipe: Recipe, bases: Sequence[BaseSpec], default: BaseSpec) -> dict[str, str]:
    """Return the values for _SCAFFOLD from the newest row of a recipe, with CUDA if there is one.

    Rows whose base is in `bases` come first. Without one, the row gets the `default` base.
    """
    known = {(base.name, base.python) for base in bases}
    rows = [row for row in recipe.matrix if row.cuda and recipe.platform in row.platforms]
    rows = [row for row in rows if (row.base, row.python) in known] or rows
    row = max(rows, key=lambda row: (row.cuda != (NO_CUDA,), natural(row.version), natural(row.cuda[-1])))
    gpu = row.cuda != (NO_CUDA,)

    def listed(values: Iterable[str]) -> str:
        return ", ".join(map(json.dumps, values))

    own = next((base for base in bases if (base.name, base.python) == (row.base, row.python)), default)
    lines = [
        f"    {name}: [{listed(values)}]\n"
        for name in ("extras", "packages", "constraints")
        if (values := getattr(row, name))
    ]
    lines += ["    environment:\n"] if row.environment else []
    for name, value in row.environment:
        text = value.replace(f"/python{row.python}/", f"/python{own.python}/")
        lines.append(f"      {name}: {json.dumps(text)}\n")
    return {
        "base": own.name,
        "python": own.python,
        "libraries": "with the CUDA libraries from PyPI" if gpu else "for CPUs, from PyPI",
        "capabilities": _CAPABILITIES.format(listed(row.capabilities)) if gpu else "",
        "known": f"The newest row of the bundled recipe {recipe.family}.",
        "version": row.version,
        "cuda": f'"{row.cuda[-1]}"' if gpu else NO_CUDA,
        "row": "".join(lines),
    }


def _unknown_framework(framework: str, known: Sequence[str]) -> UnknownAnswerError:
    of_pypi = FRAMEWORKS.get(framework, "")
    suggestion = of_pypi if of_pypi in known else nearest(framework, known)
    choose = (
        f"did you mean --framework {suggestion}?" if suggestion else f"choose --framework {'|'.join(known)}."
    )
    return UnknownAnswerError(
        "framework-not-known",
        f"'{framework}' is not a known framework, so its version and CUDA are not known",
        hint=f"{choose} To add it to a target: --extends TARGET. With its version in a requirements.txt: "
        "imagefactory recipe import FILE",
    )


def check_name(value: str, rule: str) -> None:
    """Raise UsageError for an argument that RULES[rule] rejects."""
    if not RULES[rule].allows(value):
        message = f"{rule} cannot be {show(value)}" if rule in ("version", "cuda") else ""
        message = message or f"{show(value)} is not a valid name for a {rule}"
        raise UsageError("option-invalid", message, hint=f"write {RULES[rule].write}")


_SCAFFOLD = """\
# yaml-language-server: $schema=recipe.schema.json
family: {family}
description: {framework} {libraries}
source: pypi
framework: {framework}    # the distribution's name in the source
platform: linux/amd64
base: {base}    # a name of bases.yaml
python: "{python}"    # the Python of that base; versions are always in quotes

{capabilities}# The checks that every image must pass; without this line all checks for the framework.
checks: [{checks}]

# Further packages, and bounds on dependencies. Rows can add their own.
packages: []
constraints: []

matrix:
  # {known}
  - version: "{version}"
    cuda: [{cuda}]
{row}"""

_CAPABILITIES = """\
# The compute capabilities that every image of this family must support.
capabilities: [{}]

"""

_CONDA_SCAFFOLD = """\
# yaml-language-server: $schema=recipe.schema.json
family: {family}
description: {framework} from conda packages, with their CUDA libraries
source: conda
framework: {framework}    # the package's name in the channels
channels: [conda-forge]    # searched in this order; the first channel that has a package is used for it
platform: linux/amd64
base: {base}    # a name of bases.yaml
python: "{python}"    # the environment's own, a conda package; versions are always in quotes

# The compute capabilities that every image of this family must support.
capabilities: ["8.0", "9.0"]

# The checks that every image must pass; without this line all checks for the framework.
checks: [{checks}]

# Further packages, and bounds on dependencies, as match specs: "numpy <2", "numpy 1.26.*",
# "jaxlib * *cuda12*". pip is for packages of PyPI. Rows can add their own.
packages: []
constraints: []
pip: []

matrix:
  # Change the version: `imagefactory lock` prints the available ones. cuda-version pins the CUDA libraries
  # of conda-forge.
  - version: "{version}"
    cuda: ["12.6"]
    packages: [cuda-version=12.6]
"""


# --- Packages that a family's description promises, and a row omits


def omitted_companions(target: Target) -> str:
    """Return a message about companions that the target omits although they exist; empty for none.

    Only companions in the description of its recipe count.
    """
    named = set(map(package_of, target.requirements))
    promised = {canonical(word) for word in re.findall(r"[A-Za-z0-9_-]+", target.description)}
    missing = [
        row
        for row in knowledge.companions(target.framework, target.version, target.python)
        if row.package in promised - named
    ]
    if target.source != "pypi" or not missing:
        return ""
    names = " and ".join(row.package for row in missing)
    write = ", ".join(f"{row.package}=={row.series}.*" for row in missing)
    return (
        f"{target.where}: {target.framework} {target.version} without {names}, which the description of "
        f"'{target.family}' promises (write packages: [{write}])"
    )


# A framework's name in conda channels -> on PyPI. The first one that a file names is its framework.
FRAMEWORKS = {
    "pytorch-gpu": "torch",
    "pytorch": "torch",
    "tensorflow-gpu": "tensorflow",
    "tensorflow": "tensorflow",
    "jaxlib": "jax",
}


def check_draft(
    text: str, family: str, recipes: Iterable[Recipe], bases: Sequence[BaseSpec]
) -> tuple[Target, ...]:
    """Return the targets that a draft would add. Raises RecipeError if it is not valid with `recipes`."""
    try:
        recipe = parse_recipe(text, f"recipes/{family}.yaml")
        targets = expand_all([*recipes, recipe], bases)
    except RecipeError as error:
        raise RecipeError(
            error.diagnostics,
            hint="change the options, or save the output of --dry-run as a recipe and fix it",
        ) from error
    return tuple(target for target in targets if target.family == recipe.family)


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageChoice:
    """The framework, version, CUDA and Python of an image, all written into the recipe."""

    framework: str
    version: str
    cuda: str
    python: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RecipeDraft:
    """A recipe's text, with lines for the reader.

    `lost` are lines about requests of the source file that the recipe omits, `notes` further lines. `choice`
    is None for a recipe without a source file.
    """

    text: str
    notes: tuple[str, ...] = ()
    lost: tuple[str, ...] = ()
    choice: ImageChoice | None = None

    @property
    def messages(self) -> tuple[str, ...]:
        """The lines of the recipe's header comment."""
        return (*self.lost, *self.notes)
