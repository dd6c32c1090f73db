"""The allowed form of each value in a recipe. Recipes are untrusted, so each value must match a rule."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.utils import canonicalize_name

from imagefactory.errors import Diagnostic, RecipeError, UsageError
from imagefactory.gpu.capability import PLATFORMS
from imagefactory.model import NO_CUDA, ReleaseCutoff, SourceLocation, Target
from imagefactory.recipes.yaml_tree import YamlNode, show
from imagefactory.suite import table
from imagefactory.suite.gpu import table as gpu_table
from imagefactory.versions import nearest

# --- Conda match specs, and their one spelling
# A subset of conda's grammar: `[channel::]name [bounds [build]]`. Not allowed are forms in which conda drops
# the star (`>=1.*`, `==1.26.*`), alternatives (`|`), brackets (`[version=...]`) and regular expressions
# (`^...$`). Rules: the match spec of conda's documentation. The spelling is rattler's, so that a solver's
# messages read as the recipe does.
#     numpy            numpy              numpy=1.26       numpy 1.26.*
#     numpy<2          numpy <2           numpy==1.26.4    numpy ==1.26.4
#     numpy 1.26.4     numpy ==1.26.4     numpy=1.26=py_0  numpy ==1.26 py_0
#     jaxlib=*=*cuda*  jaxlib * *cuda*    numpy >=1, <2    numpy <2,>=1


# The address of channels that are only a name.
CHANNEL_ROOT = "https://conda.anaconda.org"

_SEGMENT = r"[A-Za-z0-9][A-Za-z0-9._-]*"
# A host by name that no client rewrites: not a number, without the default port of https.
_SPEC_HOST = (
    r"([a-z0-9]([a-z0-9-]*[a-z0-9])?\.)*[a-z]([a-z0-9-]*[a-z0-9])?(:(?!443/)([1-9][0-9]{0,3}|[1-5][0-9]{4}))?"
)
# Not `defaults`, which means several channels; no directory of one platform; no personal token.
CHANNEL = (
    r"(?!(defaults|nodefaults|local)$|.*/(linux-64|noarch)/?$|.*/t/)"
    rf"({_SEGMENT}(/{_SEGMENT})*|https://{_SPEC_HOST}(/{_SEGMENT})+/?|file://(/[A-Za-z0-9_][A-Za-z0-9._+-]*)+/?)"
)
NAME = r"_?[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9_])?"
_SPEC_VERSION = r"([0-9]{1,4}!)?[0-9][A-Za-z0-9]*([._][A-Za-z0-9]+)*(\+[A-Za-z0-9]+([._][A-Za-z0-9]+)*)?"
_STAR = rf"{_SPEC_VERSION}\.?\*"
_SPEC_BOUND = rf"(==|!=|<=|>=|<|>|~=|=) ?{_SPEC_VERSION}|(!=|=) ?{_STAR}"
_PLAIN = rf"({_STAR}|{_SPEC_VERSION}|\*)"
_MORE = rf"(?:, ?(?:{_SPEC_BOUND}|{_STAR}))*"
# rattler does not take two stars in a row for a glob.
BUILD = r"(?:[A-Za-z0-9_.+]|\*(?!\*))+"
# name; name and a version that needs no operator; name=version=build; name and bounds.
SPEC = (
    rf"(?:(?P<channel>{CHANNEL.replace('$', '::').replace('/?', '')})::)?(?P<name>{NAME})"
    rf"(?: (?P<plain>{_STAR}{_MORE}|{_SPEC_VERSION}|\*)(?: (?P<build>{BUILD}))?"
    rf"| ?==?(?P<exact>{_PLAIN})=(?P<exact_build>{BUILD})"
    r"| ?=(?P<any>\*)"
    rf"| ?(?P<bounds>(?:{_SPEC_BOUND}){_MORE})(?: (?P<bounds_build>{BUILD}))?)?"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CondaSpec:
    """A parsed match spec. str() returns its normal form.

    `channel` is an address, empty for any channel. `version` has the sorted bounds joined by commas, `*` or
    empty for any. `build` is a build string in which `*` matches anything, empty for any.
    """

    name: str
    version: str = ""
    build: str = ""
    channel: str = ""

    def __str__(self) -> str:
        version = self.version or ("*" if self.build else "")
        name = f"{channel_name(self.channel)}::{self.name}" if self.channel else self.name
        return " ".join(filter(None, (name, version, self.build)))


def parse_spec(text: str) -> CondaSpec:
    """Return the match spec of `text`. Raises ValueError for an unsupported form."""
    match = re.fullmatch(SPEC, text, re.ASCII)
    if match is None:
        raise ValueError(f"{text!a} is not a supported match spec")
    groups = match.groupdict(default="")
    build = groups["build"] or groups["exact_build"] or groups["bounds_build"]
    return CondaSpec(
        name=groups["name"].lower(),
        version=_version(groups["plain"], groups["exact"], groups["bounds"]),
        build="" if build == "*" else build,
        channel=channel_address(groups["channel"]) if groups["channel"] else "",
    )


def channel_address(channel: str) -> str:
    """Return a channel's full address without a slash at its end. A name is a channel in CHANNEL_ROOT."""
    return (channel if "://" in channel else f"{CHANNEL_ROOT}/{channel}").rstrip("/")


def channel_name(address: str) -> str:
    """Return the shortest form of a channel's address: its name if in CHANNEL_ROOT."""
    return address.removeprefix(f"{CHANNEL_ROOT}/")


def _version(plain: str, exact: str, bounds: str) -> str:
    alone = plain or exact
    if alone and not alone.endswith("*") and "," not in alone:
        alone = f"=={alone}"
    parts = {_bound(bound.strip()) for bound in (bounds or alone).split(",")}
    return ",".join(sorted(parts - {"", "*"}))


def _bound(bound: str) -> str:
    version = bound.lstrip("=!<>~")
    operator = bound.removesuffix(version)
    version = version.strip().lower()
    if version == "*" or not (operator == "=" or version.endswith("*")):
        return f"{operator}{version}"
    return f"{'!=' if operator == '!=' else ''}{version.rstrip('*').rstrip('.')}.*"


# The checks of the CPU-level smoke test (suite), in the order in which they run.
SMOKE_CHECKS = table.CHECKS
# Those that make no sense without GPUs: `compiler` tests tools that compile code for GPUs.
GPU_CHECKS = ("cuda-version", "compiler")
# The checks of the GPU suite that a recipe may waive: not those that detect a GPU, nor controls.
WAIVABLE = tuple(
    check
    for part in ("numbers", "jit", "portability")
    for check in gpu_table.PARTS[part]
    if not check.endswith("-controls")
)
SOURCES = ("pypi", "conda")
PRIORITIES = ("strict", "disabled")
ARCHSPECS = ("x86_64", "x86_64_v2", "x86_64_v3", "x86_64_v4", "aarch64")

# imagefactory sets these itself, in every image.
RESERVED_VARIABLES = ("PATH", "VIRTUAL_ENV", "CONDA_PREFIX", "HOME", "LANG")
RESERVED_PREFIX = "NVIDIA_"
RESERVED_LABELS = re.compile(
    r"imagefactory\..*|org\.opencontainers\.image\.(title|description|version|base\..*)", re.ASCII
)


# --- The rules


@dataclass(frozen=True, slots=True)
class ValueRule:
    """The allow-list of one type of value: `pattern` must match all of it, `limit` counts characters.

    `write` completes the sentence "write ..." in an error.
    """

    pattern: str
    limit: int
    write: str

    def allows(self, value: str) -> bool:
        return len(value) <= self.limit and re.fullmatch(self.pattern, value, re.ASCII) is not None


_NAME = r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?"
_RELEASE = r"[0-9]{1,8}(\.[0-9]{1,8})*"
# Nightly releases have a day or a minute: 2.14.0a20230808, 0.1.5.post20221221.
_VERSION = rf"{_RELEASE}((a|b|rc)[0-9]{{1,14}})?(\.post[0-9]{{1,14}})?(\.dev[0-9]{{1,14}})?"
_LOCAL = r"(\+[a-z0-9]+([._][a-z0-9]+)*)"
# The bounds of PEP 440 without epochs and arbitrary equality; local versions only in exact ones.
_BOUND = (
    rf"((==|!=) ?{_RELEASE}\.\*|== ?{_VERSION}{_LOCAL}|(==|!=|<=|>=|<|>) ?{_VERSION}"
    rf"|~= ?[0-9]{{1,8}}\.{_VERSION})"
)
_BOUNDS = rf"{_BOUND}(, ?{_BOUND})*"
_PYTHON = r"3\.[0-9]{1,2}"
# Paths for no project file: the system links or recreates them, or a build writes them.
_CLOSED = (
    "bin|boot|dev|lib|lib32|lib64|libx32|mnt|opt/(env|install|pip)|proc|run|sbin|sys|tmp"
    "|usr(?!/(local|src)/)|var"
)
# An image of a registry by digest, with its host. A tag with the digest is only for readers.
_LABEL = "[a-z0-9]([a-z0-9-]*[a-z0-9])?"  # docker takes a leading - for an option
_HOST = rf"(({_LABEL}\.)+{_LABEL}|localhost|{_LABEL}(?=:))(:[0-9]{{1,5}})?"
_PART = r"[a-z0-9]+((\.|_|__|-+)[a-z0-9]+)*"
_IMAGE = (
    rf"(?!docker\.io/[^/]*$){_HOST}(/{_PART})+(:[A-Za-z0-9_][A-Za-z0-9._-]{{0,127}})?@sha256:[0-9a-f]{{64}}"
)


def _any_of(values: Sequence[str]) -> ValueRule:
    written = " or ".join(f'"{value}"' for value in values)
    return ValueRule("|".join(re.escape(value) for value in values), 40, written)


# JSON schemas and editors do not support Python's named groups.
_SPEC = re.sub(r"\(\?P<[a-z_]+>", "(", SPEC)
# A wheel of the project, by its path from the root, with the name from its build tool.
_WHEEL = (
    rf"\./([A-Za-z0-9_+-][A-Za-z0-9._+-]*/)*[A-Za-z0-9]+([._][A-Za-z0-9]+)*-{_VERSION}{_LOCAL}?"
    r"(-[0-9][A-Za-z0-9_.]*)?(-[A-Za-z0-9_.]+){3}\.whl"
)
# A source that is built into a wheel first: a directory from the root, `.` for the root, or a commit.
_STEP = r"[A-Za-z0-9_+-][A-Za-z0-9._+-]*"
_DIRECTORY = rf"(?!.*\.whl$)\.(/{_STEP})*"
_GIT = rf"git\+https://{_HOST}(/[A-Za-z0-9_~-][A-Za-z0-9._~-]*)+@[0-9a-f]{{40}}(#subdirectory={_STEP}(/{_STEP})*)?"
_AGE = r"[0-9]{1,4} (hour|day|week)s?"
_EXCEPT = rf"( except {_NAME}(, ?{_NAME})*)?"
_PACKAGE = rf"{_NAME}(\[{_NAME}(, ?{_NAME})*\])?( ?{_BOUNDS})?"

RULES: Mapping[str, ValueRule] = {
    "family": ValueRule(
        r"[a-z][a-z0-9]*(-[a-z0-9]+)*", 40, 'lower-case letters, digits and single hyphens, such as "pytorch"'
    ),
    "description": ValueRule(
        r"[A-Za-z0-9]([A-Za-z0-9 .,;:()/+_=-]*[A-Za-z0-9.,;:()/+_=-])?",
        200,
        "one line of letters, digits, spaces and . , ; : ( ) / + _ = - that starts with a letter or digit "
        "and does not end in a space",
    ),
    "source": _any_of(SOURCES),
    "platform": _any_of(PLATFORMS),
    "channel": ValueRule(
        CHANNEL,
        200,
        'a channel without user, token and platform, such as "conda-forge" or "https://conda.example.org/lab"',
    ),
    "channel-priority": _any_of(PRIORITIES),
    "cooldown": ValueRule(
        rf"{_AGE}{_EXCEPT}", 500, 'an age such as "7 days", also with packages: "7 days except numpy, torch"'
    ),
    "archspec": _any_of(ARCHSPECS),
    "driver": ValueRule(r"[1-9][0-9]?\.[0-9]", 4, 'the CUDA version of a driver in quotes, such as "12.4"'),
    "on": ValueRule(
        r"[a-z][a-z0-9]*(-[a-z0-9]+(\.[0-9]+)*)+", 100, 'the name of a target, such as "pytorch-2.3-cu121"'
    ),
    "framework": ValueRule(_NAME, 100, 'a distribution\'s name without version or extras, such as "torch"'),
    "base": ValueRule(r"[a-z][a-z0-9]*(-[a-z0-9]+)*", 40, 'the name of a base, such as "debian-12"'),
    "image": ValueRule(
        _IMAGE, 255, 'an image by digest, such as "docker.io/library/debian@sha256:" and 64 hex digits'
    ),
    "interpreter": ValueRule(
        r"(/[A-Za-z0-9_][A-Za-z0-9._+-]*)+",
        200,
        'the absolute path of Python in the image, such as "/usr/local/bin/python3.11"',
    ),
    "python": ValueRule(_PYTHON, 8, 'the minor version in quotes, such as "3.11"'),
    "capability": ValueRule(
        r"[0-9]{1,2}\.[0-9]|gfx[0-9]{1,2}[0-9a-f]{2}",
        7,
        'a compute capability in quotes, such as "8.0", or an AMD processor, such as gfx90a',
    ),
    "check": ValueRule(
        "|".join(map(re.escape, SMOKE_CHECKS)), 40, f"one of the known checks: {', '.join(SMOKE_CHECKS)}"
    ),
    "waived": ValueRule(
        "|".join(map(re.escape, WAIVABLE)), 40, f"a check of the GPU suite: {', '.join(WAIVABLE)}"
    ),
    "package": ValueRule(
        rf"{_PACKAGE}|{_WHEEL}|{_DIRECTORY}|{_GIT}",
        300,
        'a package with bounds, such as "numpy<2", a wheel of the project, such as '
        '"./wheels/mylib-1.0-py3-none-any.whl", a directory with its source, such as "./src/mylib", or '
        '"git+https://HOST/REPOSITORY@" and the 40 digits of a commit; no markers or options',
    ),
    "wheel": ValueRule(_WHEEL, 200, 'a wheel of the project, such as "./wheels/mylib-1.0-py3-none-any.whl"'),
    "match spec": ValueRule(
        _SPEC,
        200,
        'a package as a match spec (name, bounds and build), such as "numpy <2", "numpy 1.26.*" or '
        '"jaxlib * *cuda12*"; no brackets, no | and no star after >= or ==',
    ),
    "added package": ValueRule(
        f"{_PACKAGE}|{_WHEEL}|{_DIRECTORY}|{_GIT}|{_SPEC}",
        300,
        'a package with bounds, such as "numpy<2"; no addresses, markers or options',
    ),
    "frozen file": ValueRule(
        rf"\.(/{_STEP})+", 200, 'the path of a lock file from the root of the project, such as "./uv.lock"'
    ),
    "constraint": ValueRule(
        rf"{_NAME} ?{_BOUNDS}", 200, 'a package and its bounds, such as "numpy<2"; no extras, no addresses'
    ),
    "excluded package": ValueRule(
        _NAME, 100, 'a distribution\'s name without version or extras, such as "opencv-python-headless"'
    ),
    "index name": ValueRule(
        r"[a-z0-9]+(-[a-z0-9]+)*", 60, 'the name of an index of the settings, such as "pytorch-cu128"'
    ),
    "extra": ValueRule(_NAME, 40, 'the name of an extra, such as "cuda12"'),
    "version": ValueRule(
        r"[0-9]{1,4}(\.[0-9]{1,4}){1,3}", 20, 'the version in quotes, such as "2.3", and no bounds'
    ),
    "cuda": ValueRule(
        rf"[1-9][0-9]?(\.[0-9]{{1,2}})?|{NO_CUDA}",
        5,
        'the CUDA version in quotes, such as "12.1" or "12", or none for CPUs',
    ),
    "rocm": ValueRule(r"[1-9][0-9]?(\.[0-9]{1,2})?", 5, 'the ROCm version in quotes, such as "6.4" or "7"'),
    "variable": ValueRule(
        r"[A-Z][A-Z0-9_]*", 64, 'capital letters, digits and underscores, such as "OMP_PLACES"'
    ),
    "value": ValueRule(
        r"[A-Za-z0-9_./:=,+@%-]*", 1024, "only letters, digits and _ . / : = , + @ % -, without spaces"
    ),
    "label": ValueRule(
        r"[a-z0-9]+([._-][a-z0-9]+)*",
        100,
        'lower-case words with . between them, such as "org.opencontainers.image.source"',
    ),
    "label value": ValueRule(
        r"[!-\[\]-z~]([ -\[\]-z~]*[!-\[\]-z~])?",
        1024,
        "one line of ASCII without braces and backslashes, and without spaces at its ends",
    ),
    "folder": ValueRule(
        rf"/|/(?!({_CLOSED})(/|$))[A-Za-z0-9_][A-Za-z0-9._+-]*(/[A-Za-z0-9_.+-]*[A-Za-z0-9_+-])*",
        200,
        'an absolute path, such as "/app", outside of system directories and the environment',
    ),
    "pattern": ValueRule(
        r"(?!(.*/)?\.\.(/|$))[A-Za-z0-9_.*?\[][A-Za-z0-9_.*?+\[\]-]*(/[A-Za-z0-9_.*?+\[\]-]+)*",
        200,
        'a file, directory or glob, relative to the project, such as "train.py" or "src/**/*.py"',
    ),
    "argument": ValueRule(
        r"[ -\[\]-z~]+", 1024, "ASCII without braces and backslashes; a command is a list: [python, train.py]"
    ),
    "workdir": ValueRule(r"(/[A-Za-z0-9_.+-]*[A-Za-z0-9_+-])+", 200, 'an absolute path, such as "/app"'),
    "user": ValueRule(
        r"[0-9]{1,9}(:[0-9]{1,9})?",
        20,
        'a user, or user and group, by number in quotes: "1000" or "1000:100"',
    ),
    # bases.yaml
    "suite": ValueRule(r"[a-z]+", 20, 'the code name of a Debian release, such as "bookworm"'),
    "glibc": ValueRule(r"2\.[0-9]{1,2}", 5, 'the version of the C library in quotes, such as "2.36"'),
    "debian package": ValueRule(
        r"[a-z0-9][a-z0-9+.-]+", 80, 'the name of a Debian package, such as "python3"'
    ),
    "public": ValueRule(
        r"[a-z0-9.-]+(:[0-9]+)?(/[a-z0-9._-]+)+:[A-Za-z0-9._-]+",
        200,
        'registry, repository and tag, such as "docker.io/library/debian:12-slim"',
    ),
}

# --- Requirements

_NAME_END = re.compile(r"[ \[<>=!~]")

# The rules for packages and constraints, and their stored form. Additions to a target that only `expand`
# knows are stored as written.
REQUIREMENT_RULES = {"pypi": ("package", "constraint"), "conda": ("match spec", "match spec")}


@dataclass(frozen=True, slots=True, kw_only=True)
class RequirementContext:
    """The context for checks of requirements. `on` is the parent target, empty for none."""

    kind: str
    framework: str
    channels: tuple[str, ...]
    on: str = ""


def normal_requirement(requirement: str, kind: str) -> str:
    """Return a valid requirement in the normal form of its source."""
    if kind == "conda":
        return str(parse_spec(requirement))
    return _normal_pypi(requirement) if kind == "pypi" else requirement


def _normal_pypi(requirement: str) -> str:
    """Return a normalized name with sorted bounds and no spaces. Paths and sources are unchanged."""
    if requirement.startswith((".", "git+")):
        return requirement
    name = _NAME_END.split(requirement, maxsplit=1)[0]
    extras = requirement.partition("[")[2].partition("]")[0]
    bounds = requirement[len(name) :].rpartition("]")[2].replace(" ", "")
    names = ",".join(sorted({canonical(extra.strip()) for extra in extras.split(",") if extra}))
    limits = ",".join(sorted(set(bounds.split(","))))
    return f"{canonical(name)}{f'[{names}]' if names else ''}{limits}"


def default_checks(framework: str) -> tuple[str, ...]:
    """Return the checks of an image without `checks` in its recipe: all for its framework."""
    known = SMOKE_CHECKS if framework in table.FRAMEWORKS else table.OTHER_CHECKS
    return tuple(check for check in known if check not in table.ASKED_CHECKS)


def check_name_problem(check: str, framework: str) -> tuple[str, str, str] | None:
    """Return the problem with a required check for this framework and the fix, or None."""
    allowed = default_checks(framework)
    if not framework or check not in SMOKE_CHECKS or check in (*allowed, *table.ASKED_CHECKS):
        return None
    write = f"write checks: [{', '.join(allowed)}]"
    return "check-unknown", f"the check '{check}' does not exist for '{framework}'", write


def requirement_problem(text: str, key: str, source: RequirementContext) -> tuple[str, str, str] | None:
    """Return the problem and the fix, or None. Texts that violate their rule are reported elsewhere.

    The framework's own requirement comes from the row's version, and Python's from `python`.
    """
    conda = source.kind == "conda"
    if not RULES["match spec" if conda else "package"].allows(text) or is_source(text):
        return None
    spec = parse_spec(text) if conda else None
    name = spec.name if spec else package_of(text)
    if name == source.framework and not (spec and key == "constraints" and not spec.version):
        write = "set its version with the row's 'version' and its extras with 'extras'"
        if conda:
            write = f"set its version with the row's 'version', its build with a constraint '{name} * BUILD'"
        if source.on:
            write = f"remove it: it comes from {source.on}"
        return "framework-listed", f"'{name}' is the framework and cannot be in '{key}'", write
    if spec is None:
        return None
    if name == "python" and key == "packages":
        message = "'python' cannot be in 'packages': every environment has it"
        return "python-listed", message, "remove it, and write python: next to base:"
    if key == "constraints" and not (spec.version or spec.build or spec.channel):
        write = f"write bounds, such as '{name} <2', or move it to 'packages'"
        return "constraint-empty", f"'{name}' has no bounds", write
    if spec.channel and source.channels and spec.channel not in source.channels:
        known = ", ".join(map(channel_name, source.channels))
        message, write = f"the channel of {show(text)} is not in 'channels'", f"use one of {known}"
        if source.on:
            message = f"{source.on} does not have the channel of {show(text)}"
        else:
            write = f"add {channel_name(spec.channel)} to 'channels', or {write}"
        return "channel-unknown", message, write
    return None


def rule_hint(text: str, rule: str) -> str:
    """Return the fix for a text that RULES[rule] rejects."""
    if rule == "channel":
        if text in ("defaults", "nodefaults", "local"):
            return f"'{text}' is a placeholder: write the channel's own name, such as \"conda-forge\""
        if re.match(r"[/.~]", text):
            return 'write the absolute path of a directory: "file:///data/channel"'
        if text != without_secrets(text):
            return "remove the user or token, and put it into ~/.netrc or ~/.rattler/credentials.json"
        if text.startswith("http://"):
            return "write https://, and set its http:// mirror in the setting 'channels'"
        if match := re.fullmatch(r"(.+)/(linux-64|noarch)/?", text):
            return f'remove the platform: "{match[1]}"'
    elif rule in ("package", "added package", "match spec", "constraint") and re.match(r"[<>=!~]", text):
        return 'put a package with several bounds in quotes: "numpy>=1,<2"'
    return f"write {RULES[rule].write}"


def without_secrets(text: str) -> str:
    """Return an address without its user and token."""
    return re.sub(r"/t/[^/]+", "/t/...", re.sub(r"(?<=://)[^/@\s]*@", "...@", text))


def is_source(text: str) -> bool:
    """Return whether an entry is a directory or repository that must be built into a wheel first."""
    return text.startswith("git+") or (text.startswith(".") and not text.endswith(".whl"))


def package_of(requirement: str) -> str:
    """Return the normalized name of the distribution of a requirement or a wheel."""
    if requirement.startswith("./"):
        return canonical(requirement.rpartition("/")[2].partition("-")[0])
    return canonical(_NAME_END.split(requirement, maxsplit=1)[0])


def named_packages(target: Target) -> frozenset[str]:
    """Return the PyPI names in the recipes of a target and its parents."""
    requirements = target.pip if target.source == "conda" else (*target.requirements, *target.pip)
    return frozenset(map(package_of, requirements))


def canonical(name: str) -> str:
    """Return a distribution's or extra's name in normal form (PEP 503, PEP 685)."""
    return re.sub(r"[-_.]+", "-", name).lower()


# --- The reader of values in a YAML tree, each with its place; it collects problems


MAX_PROBLEMS = 50


class NodeReader:
    """Reads typed values and collects problems. An invalid value reads as empty."""

    def __init__(self, file: str) -> None:
        self.file = file
        self.faults: set[tuple[int, int, Diagnostic]] = set()

    def fault(self, location: SourceLocation, code: str, message: str, write: str) -> None:
        self.faults.add((location.line, location.column, Diagnostic(code, str(location), message, write)))

    def finish(self) -> None:
        """Raise RecipeError with all problems in the order of the file."""
        if self.faults:
            in_order = sorted(self.faults, key=lambda fault: (*fault[:2], str(fault[2])))
            faults = [diagnostic for *_, diagnostic in in_order]
            if (rest := len(faults) - MAX_PROBLEMS) > 0:
                faults[MAX_PROBLEMS:] = [Diagnostic("more-problems", self.file, f"{rest} more problems")]
            raise RecipeError(faults)

    def mapping(
        self, node: YamlNode, known: Sequence[str], required: Mapping[str, str]
    ) -> dict[str, YamlNode]:
        """Return key -> value. Reports unknown, repeated and missing keys."""
        if node.kind != "map":
            write = f"write {next(iter(required.values()), f'{known[0]}: and its value')}"
            message = f"expected keys and values, found {node.called}"
            self.fault(node.where, "not-a-mapping", message, write)
            return {}
        values: dict[str, YamlNode] = {}
        for name, key, value in self.pairs(node, "keys"):
            if name in known:
                values[name] = value
                continue
            suggestion = nearest(name, known)
            hint = (
                f"did you mean '{suggestion}'?" if suggestion else f"use one of the keys {', '.join(known)}"
            )
            self.fault(key.where, "unknown-key", f"unknown key {show(name)}", hint)
        for name, example in required.items():
            if name not in values:
                self.fault(node.where, "missing-key", f"'{name}' is missing", f"write {example}")
        return values

    def pairs(self, node: YamlNode | None, key: str) -> Iterator[tuple[str, YamlNode, YamlNode]]:
        """Yield name, key node, value node of a map. Repeated names are reported and yielded once."""
        if node is None:
            return
        if node.kind != "map":
            message = f"'{key}' must have names and values, not {node.called}"
            self.fault(node.where, "not-a-mapping", message, 'write NAME: "value"')
            return
        seen: dict[str, SourceLocation] = {}
        for name, value in node.pairs:
            if name.kind != "text":
                self.fault(name.where, "key-not-text", f"expected a key, found {name.called}", "write a word")
            elif name.text in seen:
                message = f"{show(name.text)} is already set at {seen[name.text]}"
                self.fault(name.where, "duplicate-key", message, "remove one of them")
            elif name.text == "<<":
                message = "merge keys (<<) are not supported"
                self.fault(name.where, "yaml-unsupported", message, "write the values out")
            else:
                seen[name.text] = name.where
                yield name.text, name, value

    def items(self, node: YamlNode | None, key: str, write: str) -> list[YamlNode]:
        """Return the items of a list that must not be empty."""
        if node is None:
            return []
        if node.kind != "list":
            message = f"'{key}' must be a list, not {node.called}"
            self.fault(node.where, "not-a-list", message, f"write {write}")
        elif not node.items:
            self.fault(node.where, "empty-list", f"'{key}' is empty", f"write {write}")
        return node.items

    def text(self, node: YamlNode | None, key: str, rule: str) -> str:
        """Return a text that RULES[rule] allows, empty for a missing key, which is reported elsewhere."""
        if node is None:
            return ""
        allowed = RULES[rule]
        if node.kind != "text" or node.made == "nothing":
            message = f"'{key}' must be text, not {node.called}"
            self.fault(node.where, "not-text", message, f"write {allowed.write}")
        elif node.made:
            quoted = f'"{node.text}"' if allowed.allows(node.text) else allowed.write
            message = f"'{key}' must be text, but YAML reads {show(node.text)} as {node.made}"
            self.fault(node.where, "quotes-missing", message, f"write it in quotes: {quoted}")
        elif not allowed.allows(node.text):
            named = rule in ("check", "waived")
            suggestion = nearest(node.text, allowed.pattern.replace("\\", "").split("|")) if named else ""
            write = f"did you mean '{suggestion}'?" if suggestion else rule_hint(node.text, rule)
            size = len(node.text)
            long = f" of {size} characters (limit {allowed.limit})" if size > max(allowed.limit, 20) else ""
            message = f"'{key}' has the invalid value {show(without_secrets(node.text))}{long}"
            self.fault(node.where, "value-invalid", message, write)
        else:
            return node.text
        return ""

    def image(self, node: YamlNode | None, key: str) -> str:
        """Return a reference to an image by digest. Reports Docker's short names and bare tags."""
        if node is None or node.kind != "text" or node.made or RULES["image"].allows(node.text):
            return self.text(node, key, "image")
        full, quoted = _written_out(node.text), show(node.text, limit=160)
        digest = node.text.partition("@")[2]
        if not full or full == node.text:
            return self.text(node, key, "image")
        if digest:
            message = f"'{key}' {quoted} is a short name without a registry"
            self.fault(node.where, "image-short-name", message, f"write {full}")
        else:
            write = f"write {full}; `skopeo inspect docker://{full.partition('@')[0]}` prints the digest"
            message = f"'{key}' {quoted} has no digest, so it can change"
            self.fault(node.where, "image-not-pinned", message, write)
        return ""

    def texts(self, node: YamlNode | None, key: str, rule: str, *, empty: bool = True) -> tuple[str, ...]:
        """Return the distinct texts of a list, each allowed by RULES[rule]. `empty` allows an empty list."""
        if node is None:
            return ()
        if node.kind != "list" or not (node.items or empty):
            self.items(node, key, f"{key}: [...] with {RULES[rule].write}")
            return ()
        seen: dict[str, SourceLocation] = {}
        for item in node.items:
            text = self.text(item, key, rule)
            if text and (first := seen.setdefault(text, item.where)) is not item.where:
                message = f"duplicate {show(text)} in '{key}', first at {first}"
                self.fault(item.where, "duplicate-value", message, "remove one")
        return tuple(seen)


def _written_out(text: str) -> str:
    """Return the full reference of `text`, as a recipe must write it; empty for an invalid one.

    Docker reads a name without a host as one of docker.io, and one of docker.io without a directory as one
    of library.
    """
    reference, _, digest = text.partition("@")
    host, slash, rest = reference.partition("/")
    if not slash or not ("." in host or ":" in host or host == "localhost"):
        host, rest = "docker.io", reference
    if host == "docker.io" and "/" not in rest:
        rest = f"library/{rest}"
    image = f"{host}/{rest}@{digest or 'sha256:' + 64 * '0'}"
    if not RULES["image"].allows(image):
        return ""
    return image if digest else image.replace(64 * "0", "<64 hex digits>")


def within(bounds: str, version: str) -> bool:
    """Return whether bounds allow a release."""
    try:
        parts = (part if not part[:1].isdigit() else f"=={part}" for part in bounds.split(","))
        return bool(SpecifierSet(",".join(parts)).contains(version, prereleases=True))
    except InvalidSpecifier:
        return False


def quoted(text: str) -> str:
    """Return a list item that YAML reads as text. No rule allows a quote or a backslash."""
    words = {"y", "n", "yes", "no", "on", "off", "true", "false", "null"}
    plain = re.fullmatch(r"[a-z_][a-z0-9_./-]*( ?[=<>!~][A-Za-z0-9.*=<>!~_]*)?", text)
    return text if plain and text not in words else f'"{text}"'


@dataclass(frozen=True, slots=True)
class Cooldown:
    """The least age of a release to lock, and the normalized names of packages without such a limit."""

    age: timedelta
    allowed: tuple[str, ...]


def parse_cooldown(text: str) -> Cooldown:
    """Return the age in a text that the rule `cooldown` allows (`7 days except numpy`); empty means 0."""
    age, _, names = text.partition(" except ")
    number, _, unit = (age or "0 days").partition(" ")
    return Cooldown(timedelta(**{f"{unit.rstrip('s')}s": int(number)}), _names(names))


def longest_cooldown(texts: Iterable[str]) -> Cooldown:
    """Return the longest age of some cooldowns. Each exception in one of them applies."""
    parsed = [parse_cooldown(text) for text in texts]
    names = {name for cooldown in parsed for name in cooldown.allowed}
    return Cooldown(max(cooldown.age for cooldown in parsed), tuple(sorted(names)))


def parse_cutoff(text: str, now: datetime) -> ReleaseCutoff | None:
    """Return the cutoff of a date, of a time or of an age before `now`; None for an age of 0.

    A date (`2026-11-21`) includes the whole day in UTC. Each form may end with ` except NAME, NAME`. Raises
    UsageError.
    """
    if RULES["cooldown"].allows(text):
        return cutoff_of(parse_cooldown(text), now)
    moment, _, names = text.partition(" except ")
    try:
        if not re.fullmatch(r"[0-9-]{10}(T[0-9:]{8}Z)?" + _EXCEPT, text, re.ASCII):
            raise ValueError
        time = datetime.fromisoformat(moment)
    except ValueError as error:
        raise UsageError(
            "cutoff-invalid",
            f"'{text}' is not a date, a time or an age",
            hint='write 2026-11-21, 2026-11-21T12:00:00Z or "7 days", also with packages: '
            '"7 days except numpy"',
        ) from error
    if time.tzinfo is None:
        time = time.replace(tzinfo=UTC) + timedelta(days=1, seconds=-1)
    return ReleaseCutoff(time=time, allowed=_names(names))


def parse_stored_cutoff(text: str) -> ReleaseCutoff | None:
    """Return the cutoff that a lock contains, None if it is written differently."""
    try:
        cutoff = parse_cutoff(text, datetime.min.replace(tzinfo=UTC)) if "T" in text else None
    except UsageError:
        return None
    return cutoff if str(cutoff) == text else None


def cutoff_of(cooldown: Cooldown, now: datetime) -> ReleaseCutoff | None:
    """Return the cutoff of a cooldown at a time, None for an age of 0."""
    if not cooldown.age:
        return None
    return ReleaseCutoff(time=now.replace(microsecond=0) - cooldown.age, allowed=cooldown.allowed)


def _names(text: str) -> tuple[str, ...]:
    return tuple(sorted({canonicalize_name(name.strip()) for name in text.split(",") if name.strip()}))
