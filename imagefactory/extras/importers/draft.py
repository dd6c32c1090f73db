"""Convert the requirements of an environment into the text of a valid recipe.

Pure. A recipe must set framework, version, CUDA and Python. If the file sets none, the solver or the user
decides (new.py). A request in the file that the recipe cannot contain is a loss. A choice for a value that
the file does not set is a note.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from packaging.requirements import Requirement

from imagefactory.errors import UsageError
from imagefactory.extras.importers.framework_row import (
    FrameworkRow,
    bounds_in,
    find_framework,
    fits_python,
    pypi_name,
    series_within,
)
from imagefactory.extras.importers.spec import INSTEAD, EnvironmentSpec, minor_python
from imagefactory.gpu import knowledge
from imagefactory.model import BaseSpec, Target
from imagefactory.recipes.edit import FRAMEWORKS, ImageChoice, RecipeDraft
from imagefactory.recipes.values import (
    RULES,
    canonical,
    channel_address,
    channel_name,
    default_checks,
    parse_spec,
    quoted,
    within,
)
from imagefactory.recipes.yaml_tree import show
from imagefactory.suite import table
from imagefactory.versions import natural

# --- Packages that PyPI does not have, and their rows of `index`
# Pure. The address of an index is a setting of the user, never a recipe's. If the settings lack it, the hint
# has the two lines to add.


@dataclass(slots=True, kw_only=True)
class IndexRows:
    """The rows of `index` in a recipe: index names by package.

    `missing` are the packages whose index is not in the settings, with the line to add. `notes` are about
    packages whose wheels are on another index.
    """

    rows: dict[str, str] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def index_rows(spec: EnvironmentSpec, known: Mapping[str, str]) -> IndexRows:
    """Return the rows for the PyPI packages in `spec`. `known` are the indexes in the settings, by name."""
    index = IndexRows()
    names = {url.rstrip("/"): name for name, url in known.items()}
    bounds_by_name = {}
    for text in spec.index_requirements:
        requirement = Requirement(text)
        bounds_by_name[canonical(requirement.name)] = str(requirement.specifier)
    torch = _tag_of_torch(spec, bounds_by_name)
    for package, bounds in bounds_by_name.items():
        tag = _tag(spec, package) or torch
        row = knowledge.external_indexes(package, bounds, tag)
        if row is None or (row.tagged and not torch):
            continue
        name, url = row.with_tag(torch if row.tagged else tag)
        if not row.index:
            index.notes.append(
                f"{package}{bounds}: PyPI may have no wheel of it ({url} says where wheels are)"
            )
        elif index_name := names.get(url.rstrip("/")):
            index.rows[package] = index_name
        else:
            index.missing[package] = f'write below [indexes] in imagefactory.toml: {name} = "{url}"'
    return index


def _tag_of_torch(spec: EnvironmentSpec, bounds_by_name: Mapping[str, str]) -> str:
    """Return the build tag of torch if PyPI lacks that build. Packages released with torch use it too."""
    tag = _tag(spec, "torch")
    if "torch" not in bounds_by_name or not tag.startswith("cu"):
        return ""
    pinned = re.fullmatch(r"==([0-9.]+?)(\.\*)?", bounds_by_name["torch"])
    offered = (
        {wheel.cuda.replace(".", "") for wheel in knowledge.offered("torch", pinned[1])} if pinned else set()
    )
    return "" if tag.removeprefix("cu") in offered else tag


def _tag(spec: EnvironmentSpec, package: str) -> str:
    """Return the tag of a package's build, from its version or an index in the file."""
    if tag := spec.builds.get(package, ""):
        return tag
    matches = (re.search(r"/(cu[0-9]{2,3})/?$", address) for address in spec.indexes)
    return next((match[1] for match in matches if match), "")


_NEWEST_PYTHON, _OLDEST_PYTHON = 14, 9
# What wheels of a framework bring themselves, by the names of conda's packages.
_PROVIDED_PACKAGES = re.compile(
    r"pip|python|cudatoolkit|cuda-(version|runtime|cudart|libraries|nvrtc|nvtx)|pytorch-(cuda|mutex)|cudnn|nccl"
    r"|lib(cublas|cufft|curand|cusolver|cusparse|nvjitlink)"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftRequest:
    """The choices of the user or the solver for a draft. Empty values mean that the file decides.

    `indexes` are the indexes in the settings, by name.
    """

    family: str
    framework: str = ""
    version: str = ""
    cuda: str = ""
    source: str = ""
    python: str = ""
    indexes: tuple[tuple[str, str], ...] = ()


@dataclass(slots=True)
class _DraftNotes:
    """The notes and losses of an unfinished draft."""

    file: str
    notes: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)

    def note(self, message: str) -> None:
        self.notes.append(message)

    def lose(self, message: str, do: str) -> None:
        self.lost.append(f"{self.file}: {message} ({do})")


def draft(
    spec: EnvironmentSpec, request: DraftRequest, bases: Sequence[BaseSpec], notes: Sequence[str] = ()
) -> RecipeDraft:
    """Return a recipe for the environment of `spec`. `notes` are the reasons for the choices in `request`.

    Raises UsageError with the options to add if a required value is set neither in the file nor by the user,
    or if the user's choice contradicts the file.
    """
    framework, source = find_framework(spec, request.framework, request.source)
    lines = _DraftNotes(spec.file, [*spec.notes, *notes], [*spec.lost])
    if spec.locked:
        lines.note(
            "locked versions became bounds, and are solved again (--frozen keeps the very files of a lock)"
        )
    row = FrameworkRow(framework=framework, source=source, spec=spec)
    if source == "conda":
        row = _from_conda(row, lines)
        spec = row.spec
    version = request.version or row.version
    elsewhere = index_rows(spec, dict(request.indexes))
    if not request.cuda:
        row.reject_rocm()
        if framework not in elsewhere.rows:
            row.reject_other_build(version, index=elsewhere.missing.get(framework, ""))
    cuda = request.cuda or (row.explicit_cuda() if framework in elsewhere.rows else row.cuda(version))
    lines.notes += elsewhere.notes
    for package, write in elsewhere.missing.items():
        if package != framework:
            lines.lose(f"{package} has no wheel on PyPI that fits", f"{write}, and run this command again")
    if not version or not cuda:
        raise row.ask(version, cuda)
    row.reject_version(version)
    if row.other_below(cuda):
        lines.note(f"CUDA {spec.below} of the base image: {framework} {version} brings CUDA {cuda} itself")
    if others := row.other_extras(cuda):
        lines.note(f"{framework}[{','.join(others)}]: skipped, since the image has CUDA {cuda}")
    released = row.pythons(version) if source == "conda" else ()
    base, python = _python(spec, request.python, source, bases, lines, released)
    common = {
        "family": request.family,
        "description": _description(f"{framework} and what {spec.file} asks for"),
        "source": source,
        "framework": framework,
    }
    if source == "conda":
        channels = [*spec.channels]
        if INSTEAD not in channels and (spec.defaults or not channels):
            after = (
                "with the lowest priority, in place of conda's defaults"
                if channels
                else "no other channel is named"
            )
            lines.note(f"the channel {INSTEAD} was written: {after}")
            channels.append(INSTEAD)
        common["channels"] = f"[{', '.join(map(quoted, channels))}]"
    lists = _conda_lists(row, version, lines) if source == "conda" else _pypi_lists(row, cuda, lines)
    capabilities = spec.parts.capabilities
    capabilities = capabilities or (("8.0", "9.0") if natural(cuda) >= natural("11.8") else ("8.0",))
    if source == "conda" and request.cuda and not row.explicit_cuda() and framework in FRAMEWORKS:
        packages, constraint = _builds_for(row, version, cuda)
        lists["packages"] = [*lists["packages"], packages]
        lists["constraints"] = [*lists.get("constraints", ()), constraint]
        lines.note(f"{packages} and {constraint} were added: without them a solver may take builds for CPUs")
    parts = [
        _head(spec, lines),
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
    parts += [_labels(spec), _environment(spec), _parts(spec)]
    parts.append(f'\nmatrix:\n  - version: "{version}"\n    cuda: ["{cuda}"]\n')
    if extras := row.extras(version, cuda):
        parts.append(f"    extras: [{', '.join(extras)}]\n")
    choice = ImageChoice(framework=framework, version=version, cuda=cuda, python=python)
    return RecipeDraft(text="".join(parts), notes=tuple(lines.notes), lost=tuple(lines.lost), choice=choice)


def draft_on(spec: EnvironmentSpec, family: str, target: Target) -> RecipeDraft:
    """Return a recipe that adds the requirements of `spec` to `target`.

    Call `target_conflicts` before, which checks the bounds in the file against the target.
    """
    lines = _DraftNotes(spec.file, [*spec.notes], [*spec.lost])
    conda = target.source == "conda"
    lists: dict[str, list[str]] = {"packages": [], "constraints": [], "pip": []}
    for text in spec.conda:
        package, channels = parse_spec(text), target.channels
        if package.name == target.framework:
            lines.note(_channel_of(text, target))
        elif not conda and _PROVIDED_PACKAGES.fullmatch(package.name):
            lines.note(f"{text} of conda: wheels bring their own")
        elif not conda:
            lines.lose(f"{text}: {target.name} takes its packages from PyPI", "write PyPI's name of it")
        elif package.channel and package.channel not in channels:
            channel = channel_name(package.channel)
            lines.lose(f"{text}: {target.name} has no channel {channel}", "use another channel")
        else:
            lists["packages"].append(text)
    for text in spec.pip:
        if pypi_name(text) in (target.framework, FRAMEWORKS.get(target.framework)):
            lines.note(_channel_of(text, target))
        else:
            lists["pip" if conda else "packages"].append(text)
    lists["pip" if conda else "packages"] += spec.sources
    more = [name for name in spec.channels if channel_address(name) not in target.channels]
    if conda and more:
        lines.lose(
            f"the channels {', '.join(more)}: only those of {target.name} are used",
            "build on a target with these channels",
        )
    if more := [text for text in spec.parts.capabilities if text not in target.capabilities]:
        lines.note(f"the capabilities {', '.join(more)}: {target.name} is made for its own")
    other_constraints = [text for text in spec.constraints if pypi_name(text) != target.framework]
    if conda:
        lists["pip"] = _with_bounds(lists["pip"], other_constraints, lines)
    else:
        lists["constraints"] = other_constraints
        _lose_patch(spec, target.python, lines)
    text = (
        _head(spec, lines)
        + f"family: {family}\ndescription: {_description(f'{spec.file} on {target.name}')}\n"
        + f"on: {target.name}    # its framework, CUDA, Python, base and packages, each as locked\n\n"
        + "".join(_list(key, values) for key, values in lists.items() if values or key == "packages")
        + _labels(spec)
        + _environment(spec)
        + _parts(spec)
    )
    choice = ImageChoice(
        framework=target.framework, version=target.version, cuda=target.cuda, python=target.python
    )
    return RecipeDraft(text=text, notes=tuple(lines.notes), lost=tuple(lines.lost), choice=choice)


def target_conflicts(spec: EnvironmentSpec, target: Target, versions: Mapping[str, str]) -> tuple[str, ...]:
    """Return the bounds in the file that `target` does not meet. `versions` are its locked wheels by name."""
    conflicts = []
    subject, framework = f"{target.name} has", target.framework
    if not fits_python(target.python, spec.python):
        conflicts.append(f"Python {spec.python}, and {subject} Python {target.python}")
    row = FrameworkRow(framework=framework, source=target.source, spec=spec)
    if (cuda := row.explicit_cuda()) not in ("", "cpu") and row.other_cuda(target.cuda):
        conflicts.append(f"CUDA {cuda}, and {subject} CUDA {target.cuda}")
    for package in map(parse_spec, spec.conda):
        if package.name == framework and not series_within(package.version, target.version):
            conflicts.append(f"{package}, and {subject} {framework} {target.version}")
    for text in dict.fromkeys((*spec.pip, *spec.constraints)):
        name, bounds = pypi_name(text), bounds_in(text)
        if version := versions.get(name, ""):
            allowed = not bounds or within(bounds, version)
        elif name in (framework, FRAMEWORKS.get(framework)):
            version, allowed = target.version, series_within(bounds, target.version)
        else:
            continue
        if not allowed:
            conflicts.append(f"{text}, and {subject} {name} {version}")
    return tuple(conflicts)


# --- its Python ---------------------------------------------------------------------------------


def python_candidates(bounds: str, bases: Sequence[BaseSpec]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the Python versions to try for PyPI packages: those of bases, then others, each the newest
    first.

    The Python of a base needs no conda channel. Versions outside of `bounds` are excluded.
    """
    carried = sorted({base.python for base in bases if base.python}, key=natural, reverse=True)
    others = [f"3.{minor}" for minor in range(_NEWEST_PYTHON, _OLDEST_PYTHON - 1, -1)]
    return (
        tuple(python for python in carried if fits_python(python, bounds)),
        tuple(python for python in others if python not in carried and fits_python(python, bounds)),
    )


def base_for(python: str, bases: Sequence[BaseSpec], source: str = "pypi") -> BaseSpec:
    """Return the base with a Python version, or else the first base. Raises UsageError if there is none."""
    fitting = [base for base in bases if base.python or source == "conda"]
    if not fitting:
        raise UsageError("no-base", "there is no base in the project", hint="add one to recipes/bases.yaml")
    return next((base for base in fitting if base.python == python), fitting[0])


def _python(
    spec: EnvironmentSpec,
    selection: str,
    source: str,
    bases: Sequence[BaseSpec],
    lines: _DraftNotes,
    released: Collection[str],
) -> tuple[BaseSpec, str]:
    """Return a base and the Python version. `selection` is tried first.

    `released` are the Python versions for which the framework was released, empty if unknown.
    """
    candidates = [selection] if selection else [base.python for base in bases if base.python]
    candidates += [f"3.{minor}" for minor in range(_NEWEST_PYTHON, 5, -1)]
    candidates.sort(key=lambda python: bool(released) and python not in released)
    python = next((python for python in candidates if fits_python(python, spec.python)), "")
    base = base_for(python, bases, source)
    if python:
        if source != "conda":
            _lose_patch(spec, python, lines)
        if not minor_python(spec.python) and not selection:
            lines.note(f"Python {python} was written: {spec.file} leaves it open")
        if source != "conda" and base.python != python:
            lines.note(f"Python {python} comes from conda-forge: no base carries it")
        return base, python
    python = base.python or "3.12"
    lines.lose(
        f"Python {spec.python} is not known: Python {python} was written", "write bounds, such as >=3.11"
    )
    return base, python


def _lose_patch(spec: EnvironmentSpec, python: str, lines: _DraftNotes) -> None:
    """Record that the patch version of Python is lost: images with PyPI packages use the Python of their
    base.
    """
    if re.fullmatch(r"(==)?3\.[0-9]+\.[0-9]+(\.\*)?", spec.python):
        lines.lose(
            f"Python {spec.python}: the image has the release of {python} of its base", f"write {python}"
        )


# --- its packages --------------------------------------------------------------------------------


def _from_conda(row: FrameworkRow, lines: _DraftNotes) -> FrameworkRow:
    """Return the row with the framework of a pip file and its companions as conda packages."""
    framework_name = FRAMEWORKS.get(row.framework, "")
    spec, companions = row.spec, knowledge.companion_names(framework_name)
    named = {package.name: package for package in map(parse_spec, spec.conda)}
    if row.framework == "jaxlib" and "jaxlib" not in named and (jax := named.get("jax")):
        lines.note(f"jaxlib was added to {jax}: it has the code for GPUs")
        spec = replace(spec, conda=[*spec.conda, str(replace(jax, name="jaxlib"))])
    if spec.conda or spec.channels:
        return replace(row, spec=spec)
    pinned = next((text for text in spec.pip if pypi_name(text) == framework_name), "")
    moved = [text for text in spec.pip if pypi_name(text) in companions and RULES["match spec"].allows(text)]
    if moved:
        lines.note(f"{', '.join(moved)}: taken from conda too, to go with {row.framework}")
    conda = [str(parse_spec(text)) for text in (f"{row.framework}{bounds_in(pinned)}", *moved)]
    return replace(row, spec=replace(spec, conda=conda, pip=[text for text in spec.pip if text not in moved]))


def _conda_lists(row: FrameworkRow, version: str, lines: _DraftNotes) -> dict[str, list[str]]:
    spec, specs = row.spec, row.conda_specs
    constraints = [str(replace(match, version="")) for match in specs if match.build or match.channel]
    for match in specs:
        if match.version not in ("", specs[0].version):
            conda_row = replace(row, spec=replace(spec, conda=[str(match)]))
            if conda_row.covers(version):
                lines.note(f"{match}: the row's version says it")
            else:
                lines.lose(f"{match}: the row has version {version}", "name one release with --framework")
    if re.fullmatch(r"(==)?3\.[0-9]+\.[0-9]+.*", spec.python):
        constraints.append(f"python {spec.python}")
    constraints += spec.conda_bounds
    same = FRAMEWORKS.get(row.framework, "")
    pypi = FrameworkRow(framework=same, source="pypi", spec=spec)
    for text in spec.pip:
        if same and pypi_name(text) == same and pypi.allows(version):
            lines.note(f"{text} of PyPI: the framework comes from conda, as {row.framework}")
        elif same and pypi_name(text) == same:
            lines.lose(f"{text} of PyPI: conda's is {row.framework} {version}", "take one of them out")
    pip = [text for text in spec.pip if not same or pypi_name(text) != same]
    bounds = [bound for bound in spec.constraints if pypi_name(bound) != same]
    lists = {
        "packages": [text for text in spec.conda if parse_spec(text).name != row.framework],
        "constraints": constraints,
        "pip": [*_with_bounds(pip, bounds, lines), *spec.sources],
    }
    return {key: values for key, values in lists.items() if values or key == "packages"}


def _with_bounds(pip: Sequence[str], constraints: Sequence[str], lines: _DraftNotes) -> list[str]:
    """Return the PyPI packages of a conda environment with their bounds, since constraints in a recipe are
    for conda.
    """
    packages = list(pip)
    for bound in constraints:
        same = [index for index, text in enumerate(packages) if pypi_name(text) == pypi_name(bound)]
        for index in same:
            more = bounds_in(bound)
            packages[index] += f",{more}" if bounds_in(packages[index]) else more
        if not same:
            lines.lose(f"the bound {bound} of what others need", "write it under pip, or as conda has it")
    return packages


def _builds_for(row: FrameworkRow, version: str, cuda: str) -> tuple[str, str]:
    """Return the package that selects conda builds for a CUDA version, and the bound on the framework's
    build.

    Sources: pytorch.org/get-started/previous-versions (the pytorch channel: cudatoolkit up to 1.12, then
    pytorch-cuda); conda-forge.org/docs/user/tipsandtricks, "Installing CUDA-enabled packages" (cuda-version).
    """
    channels = [
        channel_name(match.channel) for match in row.conda_specs if match.channel
    ] or row.spec.channels
    first = next((name for name in channels if name in ("pytorch", INSTEAD)), INSTEAD)
    name = "cuda-version"
    if first == "pytorch" and FRAMEWORKS[row.framework] == "torch":
        name = "pytorch-cuda" if natural(version) >= natural("1.13") else "cudatoolkit"
    return f"{name} {cuda}.*", f"{row.framework} * *cuda*"


def _pypi_lists(row: FrameworkRow, cuda: str, lines: _DraftNotes) -> dict[str, list[str]]:
    for text in (*row.spec.conda, *row.spec.conda_bounds):
        if _PROVIDED_PACKAGES.fullmatch(parse_spec(text).name):
            if parse_spec(text).name != "pip":
                lines.note(f"{text} of conda: the wheels of {row.framework} bring their own")
        else:
            lines.lose(
                f"{text} is conda's, and {row.framework} comes from PyPI",
                "write PyPI's name of it under pip, or take a framework of conda: --framework NAME",
            )
    bounds = [text for text in row.spec.constraints if pypi_name(text) != row.framework]
    packages = [text for text in row.spec.pip if pypi_name(text) != row.framework]
    if row.other_cuda(cuda):
        cuda_packages = [text for text in packages if re.match(r"nvidia-[a-z-]+-cu[0-9]+=|triton=", text)]
        packages = [text for text in packages if text not in cuda_packages]
        for text in cuda_packages:
            lines.lose(f"{text} is a library of another CUDA", f"{row.framework} brings its own")
    lists = {"packages": [*packages, *row.spec.sources]}
    return {**lists, **({"constraints": bounds} if bounds else {})}


def _channel_of(text: str, target: Target) -> str:
    return f"{text}: {target.name} brings {target.framework} {target.version}"


# --- text ----------------------------------------------------------------------------------------


def _head(spec: EnvironmentSpec, lines: _DraftNotes) -> str:
    text = ["# yaml-language-server: $schema=recipe.schema.json"]
    for title, some in (("Skipped", lines.lost), ("Decisions", lines.notes)):
        if some:
            text.append(f"# From {show(spec.file)[1:-1]}. {title}:")
            text += [f"#   {re.sub('[^ -~]', '?', line)}" for line in some]
    return "\n".join(text) + "\n"


def _description(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9 .,;()/+_=-]", "_", text)[:200].strip(" _")


def _list(key: str, values: Sequence[str]) -> str:
    if not values:
        return f"{key}: []\n"
    return f"{key}:\n" + "".join(f"  - {quoted(value)}\n" for value in dict.fromkeys(values))


def _index(rows: Mapping[str, str], names: Collection[str]) -> str:
    """Return the indexes of the packages that the recipe requires directly."""
    lines = [f"  {quoted(package)}: {index}\n" for package, index in rows.items() if package in names]
    return "index:\n" + "".join(lines) if lines else ""


def _labels(spec: EnvironmentSpec) -> str:
    """Return the lines of the labels, whose values may contain quotes."""
    if not spec.labels:
        return ""
    return "labels:\n" + "".join(
        f"  {quoted(name)}: '{value.replace(chr(39), chr(39) * 2)}'\n" for name, value in spec.labels.items()
    )


def _environment(spec: EnvironmentSpec) -> str:
    if not spec.environment:
        return ""
    lines = [f'  {name}: "{value}"\n' for name, value in spec.environment.items()]
    return "environment:\n" + "".join(lines)


def _parts(spec: EnvironmentSpec) -> str:
    """Return the lines of a recipe that only container files set."""
    parts = spec.parts
    lines = [_list("system", list(parts.debian))] if parts.debian else []
    if parts.files:
        directories = dict.fromkeys(directory for directory, _ in parts.files)
        inside = {
            copy_target: [pattern for directory, pattern in parts.files if directory == copy_target]
            for copy_target in directories
        }
        lines.append("files:\n")
        lines += [
            f'  "{copy_target}": [{", ".join(map(json.dumps, inside[copy_target]))}]\n'
            for copy_target in directories
        ]
    lines += [f'{key}: "{value}"\n' for key in ("workdir", "user") if (value := getattr(parts, key))]
    for key in ("entrypoint", "command"):
        if words := getattr(parts, key):
            lines.append(f"{key}: [{', '.join(json.dumps(word) for word in words)}]\n")
    return "".join(lines)
