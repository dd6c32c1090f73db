"""A commented recipe to start from, for a family of which nobody has an environment yet."""

from __future__ import annotations

from collections.abc import Sequence

from imagefactory.errors import UsageError
from imagefactory.gpu import knowledge
from imagefactory.model import Base
from imagefactory.recipes.bases import BASES_FILE
from imagefactory.extras.importers.draft import Draft
from imagefactory.extras.importers.framework_row import FRAMEWORKS
from imagefactory.recipes.values import RULES, canonical, default_checks
from imagefactory.recipes.yaml_tree import show
from imagefactory.versions import natural


def scaffold(family: str, bases: Sequence[Base], *, framework: str = "", source: str = "pypi") -> Draft:
    """A commented recipe for `family` that parses and expands without a fault.

    A family or framework that the knowledge table holds gets its newest version there, with the CUDA
    and the extras that it comes with; another, and all of conda's, get values to change. Raises UsageError
    for a name that is not allowed, or when there is no base.
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
        return Draft(text=_conda_scaffold(family, framework, bases))
    there = FRAMEWORKS.get(framework, framework)
    told = f"{framework} is what conda calls it: PyPI's is --framework {there}, conda's is --source conda"
    text = _pypi_scaffold(family, framework, bases)
    return Draft(text=text, notes=() if there == framework else (told,))


def _conda_scaffold(family: str, framework: str, bases: Sequence[Base]) -> str:
    if not bases:
        raise UsageError(
            "no-base", "there is no base in the project", hint=f"add one to recipes/{BASES_FILE}"
        )
    base = next((base for base in bases if base.python), bases[0])
    return _CONDA_SCAFFOLD.format(
        family=family,
        framework=framework,
        base=base.name,
        python=base.python or "3.12",
        checks=", ".join(default_checks(framework)),
    )


def _pypi_scaffold(family: str, framework: str, bases: Sequence[Base]) -> str:
    bases = [base for base in bases if base.python]
    if not bases:
        raise UsageError(
            "no-base", "no base in the project has a Python", hint=f"add one to recipes/{BASES_FILE}"
        )
    fits = [
        (natural(wheel.version), natural(wheel.cuda), wheel, base)
        for wheel in knowledge.cuda_wheels()
        for base in bases[:1]
        if wheel.package == framework and natural(base.python) >= natural(wheel.python)
    ]
    if fits:
        *_, wheel, base = max(fits, key=lambda fit: fit[:2])
        version, cuda, extras = wheel.version, wheel.cuda, wheel.extras
        known = f"  # {wheel.source}\n"
    else:
        version, cuda, extras, base = "1.0", "12", (), bases[0]
        known = "  # nothing is known about this framework yet: look up its versions and their CUDA\n"
    extras_line = f"    extras: [{', '.join(extras)}]\n" if extras else ""
    return _SCAFFOLD.format(
        family=family,
        framework=framework,
        base=base.name,
        python=base.python,
        checks=", ".join(default_checks(framework)),
        known=known,
        version=version,
        cuda=cuda,
        extras=extras_line,
    )


def check_name(value: str, rule: str) -> None:
    """Raises UsageError for an argument that RULES[rule] does not allow."""
    if not RULES[rule].allows(value):
        what = f"{rule} cannot be {show(value)}" if rule in ("version", "cuda") else ""
        what = what or f"{show(value)} is not a name for a {rule}"
        raise UsageError("option-invalid", what, hint=f"write {RULES[rule].write}")


_SCAFFOLD = """\
# yaml-language-server: $schema=recipe.schema.json
family: {family}
description: {framework} with the CUDA libraries from PyPI
source: pypi
framework: {framework}    # the distribution's name in the source
platform: linux/amd64
base: {base}    # a name of bases.yaml
python: "{python}"    # what that base carries; versions always stand in quotes

# The compute capabilities that every image of this family must support.
capabilities: ["8.0", "9.0"]

# The checks that every image must pass; without this line it is all that know the framework.
checks: [{checks}]

# Packages beside the framework, and bounds on what it brings along. Rows can add their own.
packages: []
constraints: []

matrix:
{known}  - version: "{version}"
    cuda: ["{cuda}"]
{extras}"""

_CONDA_SCAFFOLD = """\
# yaml-language-server: $schema=recipe.schema.json
family: {family}
description: {framework} from conda packages, with their CUDA libraries
source: conda
framework: {framework}    # the package's name in the channels
channels: [conda-forge]    # asked in this order; the first that has a package of a name gives it
platform: linux/amd64
base: {base}    # a name of bases.yaml
python: "{python}"    # the environment's own, a conda package; versions always stand in quotes

# The compute capabilities that every image of this family must support.
capabilities: ["8.0", "9.0"]

# The checks that every image must pass; without this line it is all that know the framework.
checks: [{checks}]

# Packages beside the framework, and bounds on what it brings along, as conda matches them: "numpy <2",
# "numpy 1.26.*", "jaxlib * *cuda12*". pip is for packages of PyPI. Rows can add their own.
packages: []
constraints: []
pip: []

matrix:
  # Change the version: `imagefactory lock` says which there are. cuda-version pins the CUDA libraries of
  # conda-forge.
  - version: "1.0"
    cuda: ["12.6"]
    packages: [cuda-version=12.6]
"""
