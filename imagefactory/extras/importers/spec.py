"""The requirements of an existing environment, in the terms of a recipe.

No requirement is dropped silently: `EnvironmentSpec.lost` lists what a recipe cannot contain, with its
location and a fix.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from posixpath import join, normpath

from packaging.licenses import InvalidLicenseExpression, canonicalize_license_expression
from packaging.specifiers import InvalidSpecifier, SpecifierSet

from imagefactory.model import SourceLocation
from imagefactory.recipes.values import (
    RESERVED_LABELS,
    RESERVED_PREFIX,
    RESERVED_VARIABLES,
    RULES,
    channel_address,
    channel_name,
    is_source,
    parse_spec,
    rule_hint,
    without_secrets,
)
from imagefactory.recipes.yaml_tree import YamlNode, show

PLATFORM = "linux-64"
INSTEAD = "conda-forge"
CPU_ONLY = "cpuonly"
"""The hint that a file requires builds without CUDA: the conda package that installs them."""
_SECRET = re.compile(
    r"(^|_)(TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS?|(API|ACCESS|PRIVATE)_?KEY)(_|$)", re.IGNORECASE
)
# The words of selectors that match it, and those that do not.
_SELECTORS = {
    **dict.fromkeys(("linux", "linux64", "linux-64", "unix", "x86_64", "64"), True),
    **dict.fromkeys(("osx", "osx64", "osx-64", "osx-arm64", "win", "win64", "win-64", "win32"), False),
    **dict.fromkeys(("arm64", "aarch64", "linux-aarch64", "ppc64le", "linux-ppc64le"), False),
}


@dataclass(slots=True)
class ImageParts:
    """The parts of an image other than packages and variables. image_parts.py reads them.

    `debian` has each package with the first line that requires it. `files` are directories in the image and
    the patterns of their files, relative to the root of the project.
    """

    debian: dict[str, SourceLocation] = field(default_factory=dict)
    files: list[tuple[str, str]] = field(default_factory=list)
    capabilities: tuple[str, ...] = ()
    workdir: str = ""
    user: str = ""
    entrypoint: tuple[str, ...] = ()
    command: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class LockedRow:
    """One package of a lock as its file has it: the `node` of its row, or its line as `text`.

    `kind` is the format (`uv`, `poetry`, `pylock`, `pixi`, `conda-lock`, `explicit`, `requirements`), or
    `project` for the code of the project itself.
    """

    kind: str
    where: SourceLocation
    node: YamlNode | None = None
    text: str = ""


@dataclass(slots=True)
class EnvironmentSpec:
    """The requirements of a file, in the terms of a recipe.

    `conda` are match specs and `pip` PEP 508 strings in the spelling of recipes. `conda_bounds` are match
    specs of dependencies, such as the build of Python. `channels` are names or addresses, the highest
    priority first; `defaults` is True if conda adds its default channels after them. `python` are the bounds
    on Python as a match spec, empty for none. `locked` is True if a solver chose the specs. `constraints`
    bound packages from PyPI. `hints` are words in the file that show its CUDA version; `builds` are build
    tags and build strings of packages, by name. `below` is the CUDA version of the base image, which other
    packages need not have.

    `sources` are built from source, in the format of `packages` in a recipe: a directory of the project or a
    git commit. `indexes` are the addresses of the file's indexes, without users and tokens. `files` counts
    the other files that were read. `lost` are requests that a recipe cannot contain, as `file:line:column:
    what (what to do)`; `notes` are facts for the user without a loss. `frameworks` are the unselected extras
    and groups, as (type, name), with a framework that only they name.

    With `frozen` the file is a lock whose very files are kept: then `rows` has its packages for this
    environment, and no requirements are read. `main_index` is the index of most of them.
    """

    file: str
    conda: list[str] = field(default_factory=list)
    conda_bounds: list[str] = field(default_factory=list)
    pip: list[str] = field(default_factory=list)
    sources: list[str] = field(default_factory=list)
    indexes: list[str] = field(default_factory=list)
    channels: list[str] = field(default_factory=list)
    defaults: bool = False
    environment: dict[str, str] = field(default_factory=dict)
    python: str = ""
    locked: bool = False
    constraints: list[str] = field(default_factory=list)
    hints: list[str] = field(default_factory=list)
    builds: dict[str, str] = field(default_factory=dict)
    below: str = ""
    labels: dict[str, str] = field(default_factory=dict)
    parts: ImageParts = field(default_factory=ImageParts)
    files: int = 0
    lost: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    frameworks: list[tuple[str, str]] = field(default_factory=list)
    frozen: bool = False
    rows: list[LockedRow] = field(default_factory=list)
    main_index: str = ""

    @property
    def index_requirements(self) -> list[str]:
        """Return the requirements in `pip` that an index resolves, without sources and paths."""
        return [text for text in self.pip if not (is_source(text) or text.startswith("./"))]

    def merge(self, other: EnvironmentSpec) -> None:
        """Add the requirements of another file. Existing bounds on Python stay."""
        self.conda += other.conda
        self.conda_bounds += other.conda_bounds
        self.pip += other.pip
        self.sources += [entry for entry in other.sources if entry not in self.sources]
        self.indexes += [entry for entry in other.indexes if entry not in self.indexes]
        self.channels += [name for name in other.channels if name not in self.channels]
        self.defaults |= other.defaults
        self.environment |= other.environment
        self.python = self.python or other.python
        self.locked |= other.locked
        self.constraints += other.constraints
        self.hints += other.hints
        self.builds |= other.builds
        self.files += other.files
        self.lost += other.lost
        self.notes += other.notes
        self.frameworks += other.frameworks

    def leave(self, location: SourceLocation, message: str, do: str) -> None:
        """Record a request in the file that is lost. Secrets in addresses are removed."""
        self.lost.append(f"{location}: {without_secrets(message)} ({do})")

    def note(self, location: SourceLocation, message: str) -> None:
        """Record how a line was interpreted, if the image lacks none of it."""
        if (line := f"{location}: {without_secrets(message)}") not in self.notes:
            self.notes.append(line)

    def bound_python(self, bounds: str, location: SourceLocation) -> None:
        """Set bounds on Python, written as in PEP 440 or in a match spec."""
        bounds = bounds.replace(" ", "")
        if re.fullmatch(r"[0-9A-Za-z.*<>=!~,+]{0,80}", bounds, re.ASCII):
            self.python = bounds or self.python
        else:
            self.leave(
                location, f"{show(bounds)} is not a valid Python version", "write bounds, such as >=3.11"
            )

    def narrow_python(self, bounds: str, location: SourceLocation) -> None:
        """Add bounds on Python to the existing ones. Record a loss if they conflict."""
        before, current, other = self.python, minor_python(self.python), minor_python(bounds)
        if not (before and bounds):
            self.bound_python(bounds, location)
        elif not (current or other):
            self.bound_python(f"{before},{bounds}", location)
        elif (current and other and current != other) or not _allows(
            bounds if current else before, current or other
        ):
            do = "write one Python that all of it allows"
            self.leave(location, f"Python {show(bounds)}, in addition to Python {show(before)}", do)
        else:
            self.python = before if current else bounds

    def variable(self, name: str, value: str, location: SourceLocation) -> None:
        """Set an environment variable, if a recipe may set it."""
        if _SECRET.search(name) and not value:
            self.note(location, f"{show(name)} is empty, and a secret by its name: it is not set")
            return
        if _SECRET.search(name):
            do = "set it where the image runs: anyone who has the image can read its variables"
            self.leave(location, f"{show(name)} is a secret by its name", do)
            return
        owned = name in RESERVED_VARIABLES or name.startswith(RESERVED_PREFIX)
        if not owned and RULES["variable"].allows(name) and RULES["value"].allows(value):
            self.environment[name] = value
        else:
            reason = "is set by imagefactory" if owned else "is not a variable that a recipe may set"
            self.leave(location, f"{show(name)} {reason}", "set it where the image runs")

    def label(self, name: str, value: str, location: SourceLocation) -> None:
        """Set a label, if a recipe may set it."""
        owned = RESERVED_LABELS.fullmatch(name)
        allowed = RULES["label"].allows(name) and RULES["label value"].allows(value)
        if name == "org.opencontainers.image.licenses":
            try:
                canonicalize_license_expression(value)
            except InvalidLicenseExpression:
                allowed = False
        if allowed and not owned:
            self.labels[name] = value
        else:
            reason = "is set by imagefactory" if owned else "is not one that a recipe may set"
            self.note(location, f"the label {show(name)} {reason}")


def _allows(bounds: str, python: str) -> bool:
    return bool(minor_python(bounds)) or specifiers_allow(bounds, f"{python}.5")


def specifiers_allow(bounds: str, version: str, *, invalid: bool = True) -> bool:
    """Return whether PEP 440 bounds allow a version, or `invalid` if the bounds are not valid."""
    try:
        return SpecifierSet(bounds).contains(version)
    except InvalidSpecifier:
        return invalid


def minor_python(bounds: str) -> str:
    """Return the minor version (`3.11`) in conda bounds on Python, empty if they allow several."""
    match = re.fullmatch(r"(?:==|~=)?(3\.[0-9]{1,2})(\..*)?", bounds) if "," not in bounds else None
    return match[1] if match else ""


def poetry_bounds(written: str) -> str | None:
    """Convert Poetry bounds (`^1.2`, `~1.2`, `1.*`, `1.2.3`) to PEP 440, empty for any version.

    Return None for alternatives. Source: Poetry manual, "Dependency specification".
    """
    bounds = []
    for part in re.split(r"\s*,\s*|\s+(?=[<>=!~^])", written.strip()):
        match = re.fullmatch(r"(\^|~(?!=))?\s*v?([0-9]+(?:\.[0-9]+)*)(\S*)", part)
        if "|" in part:
            return None
        if match and match[1]:
            numbers = [int(number) for number in match[2].split(".")]
            keep = 1 if match[1] == "^" or len(numbers) == 1 else 2
            if match[1] == "^":  # up to the first number that is not 0
                keep = next((index + 1 for index, number in enumerate(numbers) if number), len(numbers))
            above = ".".join(map(str, [*numbers[: keep - 1], numbers[keep - 1] + 1]))
            bounds.append(f">={match[2]}{match[3]},<{above}")
        elif part not in ("", "*"):
            bounds.append(f"=={part}" if match else re.sub(r"\s+", "", part))
    return ",".join(bounds)


def selected(selector: str) -> bool | None:
    """Return whether a selector (`linux`, `not win`, `linux or osx`) matches PLATFORM, or None."""
    anyone = False
    for part in selector.strip().split(" or "):
        every = True
        for word in part.split(" and "):
            name = word.strip().removeprefix("not ").strip()
            if name not in _SELECTORS:
                return None
            every &= _SELECTORS[name] != word.strip().startswith("not ")
        anyone |= every
    return anyone


def add_channels(spec: EnvironmentSpec, node: YamlNode) -> None:
    """Add the channels in a list, the highest priority first. For `defaults`, conda-forge is added last.

    Other channels have packages that `defaults` rarely has, and conda-forge has nearly all of them. With a
    higher priority, conda-forge would replace the packages of those channels.
    """
    channels = []
    for item in items_of(spec, node, "channels"):
        named = item.get("url") or item.get("channel") if item.kind == "map" else item
        priority = re.fullmatch(r"-?[0-9]{1,9}", text_of(item, "priority"))  # of pixi: the highest first
        channels.append((-int(priority[0]) if priority else 0, named or item))
    for _, channel in sorted(channels, key=lambda pair: (pair[1].text == "defaults", pair[0])):
        add_channel(spec, channel.text, channel.where)


def add_channel(spec: EnvironmentSpec, written: str, location: SourceLocation) -> None:
    """Add a channel by name or address.

    `defaults` means Anaconda's channels, for which large organizations must pay. conda-forge has the same
    packages for everyone.
    """
    name = re.sub(r"^http://(?=conda\.anaconda\.org/)", "https://", written.rstrip("/"))
    if name == "nodefaults":
        return  # nothing but the named channels is ever asked
    if name == "defaults":
        spec.note(
            location,
            f"packages of 'defaults' come from {INSTEAD}, which has the same names (write a channel's "
            "address to take them from there)",
        )
        name = INSTEAD
    if not RULES["channel"].allows(name):
        do = rule_hint(name, "channel")
        spec.leave(location, f"the channel {show(name)} cannot be taken over", do)
    elif (short := channel_name(channel_address(name))) not in spec.channels:
        spec.channels.append(short)


def add_match_spec(spec: EnvironmentSpec, written: str, location: SourceLocation) -> None:
    """Add a match spec. Spaces and stars that conda ignores are removed."""
    text = re.sub(r"\s+", " ", written.strip())
    text = re.sub(r"^([^:\s]+)/(linux-64|noarch)::", r"\1::", text)
    text = re.sub(r" ?(===?|!=|<=|>=|~=|<|>|=|,) ?", lambda match: match[1].replace("===", "=="), text)
    text = re.sub(r"(?<=[=<>])(['\"])([^'\"]*)\1", r"\2", text)
    text = re.sub(r"((?:>=|<=|<|>)[0-9][0-9A-Za-z._]*?)\.?\*(?=,|=| |$)", r"\1", text)
    # bounds=build, which recipes write with a blank
    text = re.sub(r"([<>!~]=?[^=<>!~ ]+)=([^=<>!~, ]+)$", r"\1 \2", text)
    if re.search(r"==[^,*= ]+\*", text):  # conda drops this star; whoever wrote it wants the series
        text = re.sub(r"==([^,*= ]+\*)", r"=\1", text)
        spec.note(location, f"{show(written)} is read as {show(text)} (drop the star to mean that version)")
    if not RULES["match spec"].allows(text):
        do = f"write it as {RULES['match spec'].write.removeprefix('a package as ')}"
        spec.leave(location, f"{show(written)} cannot be taken over", do)
        return
    package = parse_spec(text)
    if package.name == "python":
        spec.python = ",".join(dict.fromkeys(filter(None, (spec.python, package.version))))
        if package.build or package.channel:
            spec.conda_bounds.append(str(replace(package, version="")))
    elif package.name == "cpuonly":
        spec.hints.append(CPU_ONLY)
    else:
        spec.conda.append(str(package))
    if package.channel and (name := channel_name(package.channel)) not in spec.channels:
        spec.channels.append(name)


def text_of(node: YamlNode, key: str) -> str:
    child = node.get(key)
    return child.text if child else ""


def items_of(spec: EnvironmentSpec, node: YamlNode, key: str) -> list[YamlNode]:
    if node.kind != "list" and node.made != "nothing":
        spec.leave(node.where, f"'{key}' is not a list", f"write {key}: and its items, each after -")
    return node.items


# --- Code that no index has: directories and git repositories, as entries of a recipe's `packages`


_COMMIT = re.compile(r"[0-9a-f]{40}")
_LOCAL_PATH = re.compile(r"\./[A-Za-z0-9_][A-Za-z0-9._+-]*(/[A-Za-z0-9_][A-Za-z0-9._+-]*)*|\.", re.ASCII)
_REPOSITORY = re.compile(r"https://[a-z0-9.-]+(:[0-9]{1,5})?(/[A-Za-z0-9_~-][A-Za-z0-9._~-]*)+", re.ASCII)
_INNER = re.compile(r"[A-Za-z0-9_+-][A-Za-z0-9._+-]*(/[A-Za-z0-9_+-][A-Za-z0-9._+-]*)*", re.ASCII)
# A commit of a repository as some hosts pack it: https://HOST/OWNER/NAME/archive/COMMIT.zip.
_ARCHIVE = re.compile(
    r"(https://[^/\s]+/[^/\s]+/[^/\s]+)/archive/(?:refs/(?:heads|tags)/)?(.+?)\.(?:zip|tar\.gz)"
)


def recipe_path(base_directory: str | None, name: str) -> str:
    """Return the path of `name` in `base_directory` in the format of recipes: relative to the root.

    Empty if it is outside of the project, or a recipe cannot contain it.
    """
    if base_directory is None or name.startswith("/"):
        return ""
    path = normpath(join(base_directory, name))
    written = path if path == "." else f"./{path}"
    return written if _LOCAL_PATH.fullmatch(written) else ""


def add_directory(
    spec: EnvironmentSpec, base_directory: str | None, directory: str, location: SourceLocation
) -> bool:
    """Add the project in a directory as a source. Record a loss if a recipe cannot contain the directory."""
    if written := recipe_path(base_directory, directory):
        if written not in spec.sources:
            spec.sources.append(written)
            message = f"the project's own code is the package '{written}'"
            built = "`imagefactory lock TARGET --build` builds its wheel"
            spec.note(location, f"{message}: {built} (remove it if you mount the code when the image runs)")
        return True
    message = f"the code of the project in {show(directory)} is not in the imagefactory project"
    spec.leave(
        location, message, "run `imagefactory init` in the directory of the code, and import the file there"
    )
    return False


def add_git(
    spec: EnvironmentSpec, address: str, location: SourceLocation, *, extras: str = "", directory: str = ""
) -> None:
    """Add `https://HOST/REPOSITORY@REVISION`, the part after `git+`, as a source.

    `directory` is a subdirectory. `extras` are lost, since an entry of a recipe cannot contain them.
    """
    address = address.partition("#")[0].partition("?")[0]
    url, revision = address, ""
    if match := re.fullmatch(r"(.+/[^@]*)@([^@]+)", address):
        url, revision = match[1], match[2]
    label = show(without_secrets(f"git+{address}"), limit=160)
    plain = re.sub(r"^(ssh|http|https)://([^@/]*@)?", "https://", url)
    if not _REPOSITORY.fullmatch(plain):
        do = "write git+https://HOST/REPOSITORY@COMMIT under packages, or copy the code into ./DIRECTORY"
        spec.leave(location, f"{label} is not a repository that a recipe can name", do)
    elif not _COMMIT.fullmatch(revision):
        if re.fullmatch(r"[0-9a-f]{7,39}", revision):
            do = f"write git+{plain}@COMMIT, with all 40 digits: git rev-parse {revision}"
            spec.leave(location, f"{label} has a shortened commit", do)
            return
        reads = revision if re.fullmatch(r"[A-Za-z0-9._/-]+", revision) else ""
        do = (
            f"write git+{plain}@COMMIT, with the commit that `git ls-remote {plain} {reads or 'HEAD'}` prints"
        )
        spec.leave(location, f"{label} may be other code tomorrow: it names no commit", do)
    elif plain != url:
        do = f"write git+{plain}@{revision} if that works, or copy the code into ./DIRECTORY"
        spec.leave(location, f"{label} is read with a user's own access", do)
    elif directory and not _INNER.fullmatch(directory):
        do = "copy that directory of the repository into the project, and write ./DIRECTORY under packages"
        spec.leave(location, f"the subdirectory {show(directory)} of {label}", do)
    else:
        written = f"git+{url}@{revision}{f'#subdirectory={directory}' if directory else ''}"
        if written not in spec.sources:
            spec.sources.append(written)
        if extras:
            do = "write the packages instead"
            spec.leave(location, f"the extras [{show(extras)[1:-1]}] of {label} are not taken", do)


def git_of_archive(address: str) -> str:
    """Convert the address of an archive on a git host to `https://HOST/REPOSITORY@REVISION`, empty for other
    addresses.
    """
    match = _ARCHIVE.fullmatch(address.partition("#")[0])
    return f"{match[1]}@{match[2]}" if match else ""
