"""Keep the very files of another tool's lock: a recipe that names the lock, and the target's lock from it.

Nothing is solved. The index and the channels are queried only for what the file does not say, such as the
size of a wheel. A package that cannot be kept is a problem with its line and a fix.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from urllib.parse import unquote, urlsplit

from packaging.markers import Marker
from packaging.requirements import InvalidRequirement, Requirement
from packaging.version import InvalidVersion, Version

from imagefactory.access import Access, package_index, uv_locker
from imagefactory.actions.lock import conda_locker
from imagefactory.errors import LockError, RecipeError, UsageError, os_problem
from imagefactory.extras.importers.draft import base_for, python_candidates
from imagefactory.extras.importers.environments import ReadOptions, read_environment_file
from imagefactory.extras.importers.framework_row import FrameworkRow, find_framework
from imagefactory.extras.importers.locks import archive_parts, channel_of
from imagefactory.extras.importers.new import RecipeRequest
from imagefactory.extras.importers.pip_lines import is_mirror, marker_matches
from imagefactory.extras.importers.spec import EnvironmentSpec, LockedRow, minor_python, text_of
from imagefactory.fs import replace_bytes
from imagefactory.gpu.capability import AMD64, MACHINES
from imagefactory.gpu.values import minor_version
from imagefactory.lock import LockRequest
from imagefactory.lock.conda import facts as conda_facts
from imagefactory.lock.conda.file import merge_depends
from imagefactory.lock.files import check_facts
from imagefactory.lock.pypi import facts as wheel_facts
from imagefactory.lock.pypi.offers import IndexWheel, best_offer, variant_of
from imagefactory.model import (
    NO_CUDA,
    BaseSpec,
    FrozenSpec,
    Lock,
    LockedCondaPackage,
    LockedWheel,
    SourceLocation,
    Target,
)
from imagefactory.progress import Progress
from imagefactory.project import Project
from imagefactory.recipes.bases import all_bases
from imagefactory.recipes.edit import ImageChoice, RecipeDraft, check_draft
from imagefactory.recipes.read import read_bases, read_each
from imagefactory.recipes.values import (
    GPU_CHECKS,
    RULES,
    canonical,
    channel_name,
    default_checks,
    quoted,
    without_secrets,
)
from imagefactory.recipes.yaml_tree import YamlNode, first_place, show
from imagefactory.suite import table
from imagefactory.versions import natural

FORMATS = {
    "uv": "uv.lock",
    "poetry": "poetry.lock",
    "pylock": "pylock.toml",
    "pixi": "pixi.lock",
    "conda-lock": "conda-lock.yml",
    "explicit": "an explicit list",
    "requirements": "requirements.txt",
}
_SHA256 = re.compile(r"[0-9a-f]{64}")
_ON_TOP = "pass --partial, and add it in a family `on` this target"
_OWN_CODE = "this-project"  # in `skip`: a line `-e .`, which has no name
_AGAIN = "lock it again with an index that publishes sha256, or pass --partial to skip it"


@dataclass(frozen=True, slots=True, kw_only=True)
class FrozenPackage:
    """One package of a frozen lock: its wheels in the file, or its conda package.

    A wheel whose name is not in the file has an empty `filename`. A conda package may lack its sha256 (then
    it has its md5), its size and its dependencies; then it is not `complete`. `index` is the address of its
    index, empty if unknown.
    """

    name: str
    version: str
    where: SourceLocation
    wheels: tuple[IndexWheel, ...] = ()
    index: str = ""
    conda: LockedCondaPackage | None = None
    complete: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class FrozenProblem:
    """A package that cannot be kept, and what to write instead. `name` is empty if it is about the file."""

    name: str
    where: SourceLocation
    message: str
    do: str

    def __str__(self) -> str:
        return f"{self.where}: {without_secrets(self.message)} ({self.do})"


@dataclass(slots=True, kw_only=True)
class FrozenLock:
    """The packages of a frozen lock for one environment, Python version and platform."""

    format: str
    python: str
    packages: list[FrozenPackage] = field(default_factory=list)
    problems: list[FrozenProblem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    main_index: str = ""

    @property
    def channels(self) -> tuple[str, ...]:
        """The channels of its conda packages, the one with the most packages first."""
        channels = [package.conda.url.rsplit("/", 2)[0] for package in self.packages if package.conda]
        return tuple(sorted(dict.fromkeys(channels), key=lambda channel: -channels.count(channel)))


def read_frozen(path: Path, root: Path, frozen: FrozenSpec, python: str) -> FrozenLock:
    """Return the packages of a lock for a Python version (`3.11`), empty for the lock's own.

    Raises UsageError and RecipeError like `read_environment_file`, and for a file that is not a lock.
    """
    reading = ReadOptions(
        pythons=(python or "3.12",),
        environment=frozen.environment,
        extras=frozen.extras,
        groups=frozen.groups,
        root=root,
        frozen=True,
    )
    spec = read_environment_file(path, reading)
    if not spec.frozen or not spec.rows:
        raise UsageError(
            "not-a-lock",
            f"{path} is not a lock with packages for this environment",
            hint=f"supported are {', '.join(FORMATS.values())}; without --frozen, other files are read too",
        )
    kind = next((row.kind for row in spec.rows if row.kind != "project"), "uv")
    lock = FrozenLock(format=FORMATS[kind], python=spec.python, main_index=spec.main_index)
    lock.notes = spec.notes
    readers = {
        "uv": _uv,
        "poetry": _poetry,
        "pylock": _pylock,
        "pixi": _pixi,
        "conda-lock": _conda_lock,
        "explicit": _explicit,
        "requirements": partial(_requirement, python=python),
        "project": _project,
    }
    for row in spec.rows:
        package = readers[row.kind](row)  # type: ignore[operator]
        if isinstance(package, FrozenProblem) and package.name in frozen.skip:
            continue
        if isinstance(package, FrozenPackage):
            if package.name not in frozen.skip:
                lock.packages.append(package)
        elif isinstance(package, FrozenProblem):
            lock.problems.append(package)
    start = first_place(spec.file)
    lock.problems += [
        FrozenProblem(name="", where=start, message=text, do="fix the file") for text in spec.lost
    ]
    by_name: dict[tuple[str, bool], FrozenPackage] = {}
    for package in lock.packages:
        other = by_name.setdefault((package.name, package.conda is None), package)
        if other is not package:
            message = (
                f"{show(package.name)} is locked twice for one environment, first in line {other.where.line}"
            )
            do = "select one with --extra or --group, or lock it again"
            lock.problems.append(
                FrozenProblem(name=package.name, where=package.where, message=message, do=do)
            )
    return lock


# --- rows of each format: a package, a problem, or None for what an image never has ---

_Read = FrozenPackage | FrozenProblem | None


def _problem(row: LockedRow, name: str, message: str, do: str) -> FrozenProblem:
    return FrozenProblem(name=canonical(name), where=row.where, message=f"{show(name)} {message}", do=do)


def _elsewhere(row: LockedRow, name: str, kind: str, address: str) -> FrozenProblem:
    """Return the problem of a package that is not from an index."""
    place = show(without_secrets(address), limit=160)
    if kind in ("git", "vcs"):
        message, write = f"comes from a git repository, {place}", "as git+https://HOST/REPOSITORY@COMMIT"
    elif kind == "url":
        message, write = f"comes from an address of no index, {place}", "as a wheel: ./wheels/..."
    else:
        message, write = f"comes from a path, {place}", "as ./DIRECTORY or as a wheel: ./wheels/..."
    return _problem(row, name, message, f"{_ON_TOP}, {write}")


def _own_code(row: LockedRow, name: str) -> FrozenProblem:
    message = "is the project's own code, and not a locked file"
    return _problem(row, name, message, f"{_ON_TOP}, as a directory: packages: [.]")


def _node(row: LockedRow) -> YamlNode:
    return row.node or YamlNode(row.where, "map")


def _rows(node: YamlNode, key: str) -> list[YamlNode]:
    value = node.get(key)
    return value.items if value else []


def _wheel(node: YamlNode, digest: str, url: str = "") -> IndexWheel | None:
    """Return the wheel of a row or of an address, None for other files."""
    url = url or text_of(node, "url")
    filename = (
        text_of(node, "filename") or text_of(node, "file") or unquote(urlsplit(url).path.rpartition("/")[2])
    )
    if not filename.endswith(".whl"):
        return None
    size, digest = text_of(node, "size"), digest.removeprefix("sha256:").lower()
    return IndexWheel(
        filename=filename,
        url=url,
        sha256=digest if _SHA256.fullmatch(digest) else "",
        size=int(size) if re.fullmatch(r"[1-9][0-9]{0,14}", size) else None,
    )


def _wheels(wheels: Iterable[IndexWheel | None]) -> tuple[IndexWheel, ...]:
    return tuple(wheel for wheel in wheels if wheel)


def _uv(row: LockedRow) -> _Read:
    node = _node(row)
    name, source = text_of(node, "name"), node.get("source") or YamlNode(row.where, "map")
    kind = next(iter(source.keys), "")
    place = text_of(source, kind)
    if kind == "virtual":
        return None  # a project without code of its own
    if kind in ("editable", "directory") and place == ".":
        return _own_code(row, name)
    if kind != "registry" or "://" not in place:
        return _elsewhere(row, name, kind, place)
    wheels = _wheels(_wheel(item, text_of(item, "hash")) for item in _rows(node, "wheels"))
    return _with_wheels(row, name, text_of(node, "version"), wheels, place)


def _with_wheels(
    row: LockedRow, name: str, version: str, wheels: Sequence[IndexWheel], index: str = ""
) -> _Read:
    if not wheels:
        do = (
            "lock a version that has wheels, or build its wheel (imagefactory recipe build-wheel --help) and "
        )
        return _problem(row, name, f"{version} has no wheel in the lock, only sources", f"{do}{_ON_TOP}")
    return FrozenPackage(
        name=canonical(name), version=version, where=row.where, wheels=tuple(wheels), index=index
    )


def _poetry(row: LockedRow) -> _Read:
    node = _node(row)
    name, source = text_of(node, "name"), node.get("source") or YamlNode(row.where, "map")
    kind, place = text_of(source, "type"), text_of(source, "url")
    if kind not in ("", "legacy"):
        return _elsewhere(row, name, {"directory": "path", "file": "path"}.get(kind, kind), place)
    wheels = _wheels(_wheel(item, text_of(item, "hash")) for item in _rows(node, "files"))
    return _with_wheels(row, name, text_of(node, "version"), wheels, place)


def _pylock(row: LockedRow) -> _Read:
    node = _node(row)
    name, version = text_of(node, "name"), text_of(node, "version")
    for kind in ("vcs", "directory", "archive"):
        if other := node.get(kind):
            place = text_of(other, "url") or text_of(other, "path")
            own = kind == "directory" and place in (".", "./")
            of_url = "url" if kind == "archive" and "://" in place else kind
            return _own_code(row, name) if own else _elsewhere(row, name, of_url, place)
    items = _rows(node, "wheels")
    if local := next((item for item in items if not text_of(item, "url")), None):
        return _elsewhere(row, name, "path", text_of(local, "path"))
    hashes = ((item, item.get("hashes") or YamlNode(row.where, "map")) for item in items)
    wheels = _wheels(_wheel(item, text_of(digests, "sha256")) for item, digests in hashes)
    return _with_wheels(row, name, version, wheels, text_of(node, "index"))


def _project(row: LockedRow) -> _Read:
    node = _node(row)
    for table_ in (node.get("project"), (node.get("tool") or node).get("poetry")):
        if table_ and (name := text_of(table_, "name")):
            return _own_code(row, name)
    return _own_code(row, "project")


def _pixi(row: LockedRow) -> _Read:
    node, address = _node(row), row.text
    key = next(iter(node.keys), "")
    if key == "conda":
        depends = tuple(item.text for item in _rows(node, "depends"))
        return _conda(row, address, node, depends if node.get("depends") or text_of(node, "size") else None)
    name, version = text_of(node, "name"), text_of(node, "version")
    if key != "pypi" or not address.startswith(("https://", "http://")):
        kind = "git" if address.startswith("git+") else "url" if "://" in address else "path"
        return _elsewhere(row, name or address, kind, address)
    wheels = _wheels([_wheel(YamlNode(row.where, "map"), text_of(node, "sha256"), address)])
    return _with_wheels(row, name, version, wheels, text_of(node, "index"))


def _conda_lock(row: LockedRow) -> _Read:
    node = _node(row)
    name, address = text_of(node, "name"), text_of(node, "url")
    digests = node.get("hash") or YamlNode(row.where, "map")
    if name.startswith("__"):
        return None  # a virtual package: a machine has it
    if text_of(node, "manager") == "pip":
        if address.startswith("git+") or "://" not in address:
            return _elsewhere(row, name, "git" if address.startswith("git+") else "path", address)
        wheels = _wheels([_wheel(YamlNode(row.where, "map"), text_of(digests, "sha256"), address)])
        return _with_wheels(row, name, text_of(node, "version"), wheels)
    bounds = node.get("dependencies")
    depends = tuple(f"{key.text} {value.text}".strip() for key, value in (bounds.pairs if bounds else ()))
    return _conda(row, address, digests, depends if bounds else None)


def _explicit(row: LockedRow) -> _Read:
    if row.text.startswith("#"):
        name, _, address = re.sub(r"^#\s*pip\s+", "", row.text).partition("@")
        address, _, digest = address.strip().partition("#")
        digest = digest.replace("=", ":").removeprefix("sha256:")
        wheels, name = _wheels([_wheel(YamlNode(row.where, "map"), digest, address)]), name.strip()
        version = wheels[0].filename.split("-")[1] if wheels else ""
        return _with_wheels(row, name, version, wheels)
    address, _, digest = row.text.split()[0].partition("#")
    digest = digest.removeprefix("sha256:").lower()
    if archive_parts(address)[0].startswith("__"):
        return None
    pair = (
        YamlNode(row.where, "text", "sha256" if len(digest) == 64 else "md5"),
        YamlNode(row.where, "text", digest),
    )
    return _conda(row, address, YamlNode(row.where, "map", pairs=[pair]), None)


def _conda(
    row: LockedRow, address: str, values: YamlNode, depends: tuple[str, ...] | None
) -> FrozenPackage | FrozenProblem:
    """Return a conda package. `values` has its hashes, and its size if the file says it."""
    name, version, build = archive_parts(address)
    label = name or address
    channel, subdir = channel_of(address), address.rpartition("/")[0].rpartition("/")[2]
    sha256, md5 = text_of(values, "sha256").lower(), text_of(values, "md5").lower()
    if "://" not in address or not name:
        return _elsewhere(row, label, "path", address)
    if not channel:
        do = "lock it for linux-64"
        return _problem(row, label, f"is for {show(subdir)}, not for linux-64 or noarch", do)
    if channel.startswith("file:"):
        return _elsewhere(row, label, "path", address)
    if not RULES["channel"].allows(channel):
        do = "lock it again from an https address without a token"
        return _problem(
            row, label, f"comes from {show(without_secrets(channel))}, which a recipe cannot name", do
        )
    if not (_SHA256.fullmatch(sha256) or re.fullmatch(r"[0-9a-f]{32}", md5)):
        do = "write the list again: conda list --explicit --sha256, or lock it again"
        return _problem(row, label, "has no hash", do)
    size = text_of(values, "size")
    package = LockedCondaPackage(
        name=name,
        version=version,
        build=build,
        subdir=subdir,
        url=address,
        filename=address.rpartition("/")[2],
        sha256=sha256 if _SHA256.fullmatch(sha256) else "",
        md5=md5,
        size=int(size) if re.fullmatch(r"[1-9][0-9]{0,14}", size) else 0,
        depends=merge_depends(depends or ()),
    )
    complete = bool(package.sha256 and package.size) and depends is not None
    return FrozenPackage(name=name, version=version, where=row.where, conda=package, complete=complete)


def _requirement(row: LockedRow, *, python: str) -> _Read:
    text = row.text
    hashes = [digest.lower() for digest in re.findall(r"--hash[= ]sha256:([0-9a-fA-F]{64})", text)]
    plain = re.sub(r"\s--hash[= ]\S+", "", f" {text}").strip()
    if match := re.match(r"(-r|--requirement|-c|--constraint)[= ]?\s*(\S+)", plain):
        do = f"write the lines of {show(match[2])[1:-1]} here, with their hashes"
        return FrozenProblem(name="", where=row.where, message=f"{show(plain)} is another file", do=do)
    if match := re.match(r"(?:-e|--editable)[= ]\s*(\S+)", plain):
        plain = match[1]
        if plain == ".":
            return _own_code(row, _OWN_CODE)
    if plain.startswith("-"):
        return None  # an index or another option: files are chosen by their hashes
    try:
        requirement = Requirement(plain)
    except InvalidRequirement:
        return _elsewhere(row, _address_name(plain), "git" if "git+" in plain else "path", plain)
    if requirement.marker and python and not marker_matches(Marker(str(requirement.marker)), python):
        return None
    if requirement.url:
        kind = "git" if requirement.url.startswith("git+") else "url"
        return _elsewhere(row, requirement.name, kind, requirement.url)
    bounds = [bound for bound in requirement.specifier if bound.operator in ("==", "===")]
    if len(bounds) != 1 or "*" in bounds[0].version:
        do = "write NAME==VERSION --hash=sha256:..., as `uv export` and `pip-compile --generate-hashes` do"
        return _problem(row, requirement.name, "has no exact version", do)
    if not hashes:
        do = "write the file with hashes: `uv export`, or `pip-compile --generate-hashes`"
        return _problem(row, requirement.name, "has no sha256", do)
    wheels = tuple(IndexWheel(filename="", url="", sha256=digest, size=None) for digest in hashes)
    return _with_wheels(row, requirement.name, bounds[0].version, wheels)


def _address_name(line: str) -> str:
    """Return a name for a line that is an address or a path. `skip` of a recipe can have it."""
    address, _, fragment = line.split()[0].partition("#")
    egg = dict(part.partition("=")[::2] for part in fragment.split("&")).get("egg", "")
    last = address.rstrip("/").rpartition("/")[2].partition("@")[0].removesuffix(".git")
    if last.endswith(".whl"):
        last = last.partition("-")[0]
    words = re.findall(r"[A-Za-z0-9]+", egg.partition("[")[0] or last.partition("[")[0])
    return "-".join(words)[:100].strip("-") or _OWN_CODE


# --- the files for one Python version and platform ---


@dataclass(slots=True, kw_only=True)
class _ChosenWheels:
    """Wheels with the address of each, the origins of those from named indexes, and the problems."""

    wheels: list[LockedWheel] = field(default_factory=list)
    offers: dict[str, tuple[IndexWheel, ...]] = field(default_factory=dict)
    unnamed: list[FrozenPackage] = field(default_factory=list)
    origins: list[tuple[str, str]] = field(default_factory=list)
    problems: list[FrozenProblem] = field(default_factory=list)


def _choose_wheels(frozen: FrozenLock, lock: Lock, index: str, named: Mapping[str, str]) -> _ChosenWheels:
    """Return the best fitting wheel of each package.

    `index` is the address of this machine's own index, `named` are the names of others by address.
    """
    chosen = _ChosenWheels()
    own = {"", index.rstrip("/"), frozen.main_index.rstrip("/")}
    for package in frozen.packages:
        if package.conda:
            continue

        def problem(message: str, do: str, package: FrozenPackage = package) -> None:
            text = f"{show(package.name)} {package.version} {message}"
            chosen.problems.append(FrozenProblem(name=package.name, where=package.where, message=text, do=do))

        address = package.index.rstrip("/")
        if address not in own and not is_mirror(address):
            if address not in named:
                line = f'{_index_name(address)} = "{address}"'
                index_text = show(without_secrets(address), limit=120)
                problem(
                    f"comes from the index {index_text}, which the settings lack",
                    f"write below [indexes] in imagefactory.toml: {line}",
                )
                continue
            chosen.origins.append((package.name, named[address]))
        if any(not wheel.filename for wheel in package.wheels):
            chosen.unnamed.append(package)
            continue
        best = best_offer(package.wheels, lock)
        if best is None:
            variants = [wheel.filename for wheel in package.wheels if variant_of(wheel.filename)]
            if variants and len(variants) == len(package.wheels):
                problem(
                    f"has only variant wheels ({variants[0]}), and a recipe cannot choose a variant",
                    "lock a version that has plain wheels",
                )
            else:
                problem(
                    f"has no wheel for Python {lock.python} on {lock.platform}",
                    "lock it for that Python and Linux on x86-64, or pass --partial to skip it",
                )
            continue
        wheel, offer = best
        if (wheel.name, Version(wheel.version)) != (package.name, _version(package.version)):
            problem(f"has a file of another package, {offer.filename}", "lock it again")
        elif not offer.sha256:
            problem(f"has no sha256 for {offer.filename}", _AGAIN)
        else:
            chosen.wheels.append(replace(wheel, size=offer.size or 0))
            chosen.offers[package.name] = (offer,)
    return chosen


def _version(text: str) -> Version | None:
    try:
        return Version(text)
    except InvalidVersion:
        return None


def _index_name(address: str) -> str:
    """Return a name for an index: `pytorch-cu128` for https://download.pytorch.org/whl/cu128."""
    parts = urlsplit(address)
    labels = (parts.hostname or "index").split(".")
    words = [labels[-2] if len(labels) > 1 and not labels[-1].isdigit() else labels[0]]
    words += [word for word in parts.path.strip("/").split("/") if word not in ("whl", "simple", "")]
    return re.sub(r"[^a-z0-9]+", "-", "-".join(words).lower()).strip("-") or "index"


def freeze(access: Access, request: LockRequest, progress: Progress) -> Lock:
    """Return the lock of a target from the file that its recipe names. Nothing is solved.

    Raises LockError for packages that cannot be kept, and for a file that the index or a channel lacks.
    """
    target = request.target
    assert target.frozen
    root = access.settings.root_path
    frozen = _read_of_target(root, target.frozen, target.python, target.name)
    lock, chosen = _offline(access, request, frozen)
    if problems := [*frozen.problems, *chosen.problems]:
        lines = "".join(f"\n  {problem}" for problem in problems)
        raise LockError(
            "frozen-not-kept",
            f"{target.name}: these packages of {target.frozen.file} cannot be kept:{lines}",
            hint="make the change in brackets, or write the names of these packages under skip at "
            f"{target.frozen.where}",
        )
    locker = uv_locker(package_index(access))
    lock = replace(lock, origins=tuple(sorted(chosen.origins)))
    wheels, offers = list(chosen.wheels), dict(chosen.offers)
    blank = [wheel for wheel in wheels if not wheel.size]  # addresses in the file are never queried
    named_packages: list[FrozenPackage | LockedWheel] = [*chosen.unnamed, *blank]
    if pins := [f"{p.name}=={p.version}" for p in named_packages]:
        listed = locker.offers(pins, lock)
        for package in chosen.unnamed:
            allowed = {wheel.sha256 for wheel in package.wheels}
            fitting = [offer for offer in listed.get(package.name, ()) if offer.sha256 in allowed]
            if (best := best_offer(fitting, lock)) is None:
                raise LockError(
                    "frozen-not-kept",
                    f"{package.where}: none of the hashes of {package.name} {package.version} is a wheel for "
                    f"Python {lock.python} on {lock.platform} in the index",
                    hint="write the file again with hashes of all files: uv export, or pip-compile "
                    "--generate-hashes",
                )
            wheels.append(best[0])
            offers[package.name] = (best[1],)
        for wheel in blank:
            fitting = [offer for offer in listed.get(wheel.name, ()) if offer.sha256 == wheel.sha256]
            if not fitting:
                raise LockError(
                    "locked-file-gone",
                    f"{target.name}: the index no longer has {wheel.filename} "
                    f"(sha256 {wheel.sha256[:12]}...)",
                    hint=f"lock {wheel.name} again in {target.frozen.file}",
                )
            offers[wheel.name] = (fitting[0],)
    sized = locker.sizes(tuple(sorted(wheels, key=lambda wheel: wheel.name)), offers, progress)
    lock = replace(lock, wheels=sized)
    if target.conda:
        lock = replace(lock, conda=_conda_packages(access, request, frozen, progress))
    check_facts(lock, target)
    return lock


def _conda_packages(
    access: Access, request: LockRequest, frozen: FrozenLock, progress: Progress
) -> tuple[LockedCondaPackage, ...]:
    target, locker = request.target, conda_locker(access)
    if target.source == "pypi":  # only its Python comes from conda, which the file does not lock
        bare = replace(target, requirements=(), constraints=(), frozen=None)
        return locker.packages(replace(request, target=bare), progress)
    packages = tuple(package.conda for package in frozen.packages if package.conda)
    bare_names = {package.name for package in frozen.packages if not package.complete}
    described = locker.described(target, [package for package in packages if package.name in bare_names])
    complete = [package for package in packages if package.name not in bare_names]
    return tuple(sorted((*complete, *described), key=lambda package: package.name))


def _offline(access: Access, request: LockRequest, frozen: FrozenLock) -> tuple[Lock, _ChosenWheels]:
    """Return an empty lock for a target, and the wheels of the file that fit it."""
    target = request.target
    index = package_index(access)
    glibc = dict(target.virtual).get("__glibc", request.base.glibc)
    platform = f"manylinux_{glibc.replace('.', '_')}_{MACHINES[target.platform]}"
    if not target.conda:
        platform = uv_locker(index).platform(target, glibc)
    lock = Lock(
        target=target.name,
        content_hash=request.content_hash,
        python=target.python,
        platform=platform,
        solver=f"the files of {frozen.format}",
        wheels=(),
        channels=target.channels,
        virtual=target.virtual,
        note=request.previous.note if request.previous else "",
    )
    named = {address.rstrip("/"): name for name, address in index.named}
    return lock, _choose_wheels(frozen, lock, index.url, named)


def _read_of_target(root: Path, frozen: FrozenSpec, python: str, target: str) -> FrozenLock:
    path = root / frozen.file
    if not frozen.sha256:
        raise LockError(
            "frozen-missing",
            f"{target}: the lock {frozen.file} is not in {root}",
            hint=f"restore the file, or change its path at {frozen.where}",
        )
    try:
        return read_frozen(path, root, frozen, python)
    except (RecipeError, UsageError) as error:
        raise LockError(
            "frozen-unreadable",
            f"{target}: {frozen.file}: {error.message}",
            hint=error.hint or "lock it again",
        ) from error


def frozen_difference(access: Access, target: Target, lock: Lock) -> tuple[str, ...]:
    """Return the packages in which a lock differs from the file that its recipe names. Offline."""
    assert target.frozen
    frozen = _read_of_target(access.settings.root_path, target.frozen, target.python, target.name)
    allowed: dict[tuple[str, bool], set[str]] = {}
    for package in frozen.packages:
        conda = package.conda
        digests = {conda.sha256 or conda.md5} if conda else {wheel.sha256 for wheel in package.wheels}
        allowed[package.name, conda is not None] = digests
    locked = {(wheel.name, False): {wheel.sha256} for wheel in lock.wheels}
    if target.source == "conda":
        locked |= {(package.name, True): {package.sha256, package.md5} for package in lock.conda}
    different = [key for key, digests in locked.items() if not digests & allowed.get(key, set())]
    return tuple(sorted({name for name, _ in (*different, *(allowed.keys() - locked.keys()))}))


# --- the recipe ---


def plan_frozen(project: Project, request: RecipeRequest, *, partial: bool) -> tuple[RecipeDraft, str]:
    """Return the recipe for a lock whose very files are kept, and the path at which the recipe expects it.

    Packages that cannot be kept are in `lost` of the draft, and in `skip` of its text. `partial` accepts
    that. Raises UsageError (also if `partial` cannot skip a line), RecipeError.
    """
    root = project.settings.root_path
    directory = root / "recipes"
    recipes = [recipe for recipe in read_each(directory)[0] if recipe.family != request.family]
    bases = all_bases(read_bases(directory), recipes)
    spec = FrozenSpec(
        file=_recipe_path(request, root),
        where=first_place(request.file.name),
        environment=request.environment,
        extras=request.extras,
        groups=request.groups,
    )
    frozen = read_frozen(request.file, root, spec, "")
    conda = {package.name: package for package in frozen.packages if package.conda}
    source = "conda" if conda else "pypi"
    if source == "conda":
        if "python" not in conda:
            raise UsageError(
                "python-not-locked",
                f"{request.file.name} has conda packages, but no python",
                hint="add python to its environment, and lock it again",
            )
        pythons: Sequence[str] = (minor_version(conda["python"].version),)
    else:
        pythons = [python for some in python_candidates(frozen.python, bases) for python in some]
        if not pythons:
            raise UsageError(
                "python-not-supported",
                f"{request.file.name} requires Python {frozen.python}, but images support 3.9 to 3.14",
                hint="change its Python bounds, for example to >=3.11, and lock it again",
            )
    trials: list[_FrozenTrial] = []
    for python in pythons:
        trials.append(_tried(project, request.file, spec, python, base_for(python, bases, source)))
        if not trials[-1].problems:
            break
    trial = min(trials, key=lambda trial: len(trial.problems))
    if partial and (nameless := [problem for problem in trial.problems if not problem.name]):
        raise UsageError(
            "import-incomplete",
            f"these lines of {request.file.name} cannot be skipped:"
            + "".join(f"\n  {problem}" for problem in nameless),
            hint="make the change in brackets",
        )
    drafted = _draft(request, spec, trial, source)
    framework = drafted.choice.framework if drafted.choice else ""
    if partial and (problem := next((p for p in trial.problems if p.name == framework), None)):
        raise UsageError(
            "framework-missing",
            f"the framework cannot be kept: {problem}",
            hint="make the change in brackets, or choose another package: --framework NAME",
        )
    check_draft(drafted.text, request.family, recipes, bases)
    return drafted, spec.file


def _recipe_path(request: RecipeRequest, root: Path) -> str:
    """Return the path of the lock in the project. A file outside of it is copied next to the recipe."""
    path = request.file.resolve()
    if path.is_relative_to(root.resolve()):
        inside = f"./{path.relative_to(root.resolve())}"
        if RULES["frozen file"].allows(inside):
            return inside
    return f"./recipes/frozen/{request.family}/{re.sub(r'[^A-Za-z0-9._-]', '_', path.name)}"


def copy_lock(project: Project, file: Path, inside: str) -> bool:
    """Copy a lock to its path in the project, unless it is there. Return whether it was copied."""
    root = project.settings.root_path
    path = root / inside
    if path.exists() and path.resolve() == file.resolve():
        return False
    if not path.parent.resolve().is_relative_to(root.resolve()):  # a link, which a clone may have
        raise UsageError(
            "link-leaves-project",
            f"{path.parent} is a symbolic link to outside the project {root}",
            hint="replace the link by a directory",
        )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_bytes(path, file.read_bytes())
    except OSError as error:
        raise UsageError(*os_problem("write", path, error), hint="check its permissions") from error
    return True


@dataclass(frozen=True, slots=True, kw_only=True)
class _FrozenTrial:
    """A lock for one Python version: the files that fit, and the problems of the others."""

    python: str
    base: BaseSpec
    frozen: FrozenLock
    lock: Lock
    problems: tuple[FrozenProblem, ...]


def _tried(project: Project, file: Path, spec: FrozenSpec, python: str, base: BaseSpec) -> _FrozenTrial:
    frozen = read_frozen(file, project.settings.root_path, spec, python)
    index = package_index(project)
    platform = uv_locker(index).empty_lock(spec.file, python, AMD64).platform
    minor = min(int(platform.split("_")[2]), int(base.glibc.partition(".")[2]))
    lock = Lock(
        target="",
        content_hash="",
        python=python,
        platform=f"manylinux_2_{minor}_x86_64",
        solver="",
        wheels=(),
    )
    named = {address.rstrip("/"): name for name, address in index.named}
    chosen = _choose_wheels(frozen, lock, index.url, named)
    unnamed = [
        LockedWheel(name=p.name, version=p.version, filename="", sha256="", size=0) for p in chosen.unnamed
    ]
    conda = tuple(package.conda for package in frozen.packages if package.conda)
    lock = replace(lock, wheels=(*chosen.wheels, *unnamed), conda=conda, channels=frozen.channels)
    problems = (*frozen.problems, *chosen.problems)
    return _FrozenTrial(python=python, base=base, frozen=frozen, lock=lock, problems=problems)


def _draft(request: RecipeRequest, spec: FrozenSpec, trial: _FrozenTrial, source: str) -> RecipeDraft:
    """Return the text of the recipe. Framework, CUDA and Python are those of the lock."""
    conda = [f"{package.name} =={package.version}" for package in trial.lock.conda]
    contents = EnvironmentSpec(
        file=request.file.name,
        pip=[f"{p.name}=={_public(p.version)}" for p in trial.frozen.packages if not p.conda],
        conda=[text for text in conda if RULES["match spec"].allows(text)],
        channels=[*trial.lock.channels],
    )
    try:
        framework, _ = find_framework(contents, request.framework, source)
    except UsageError as error:
        error.message += "".join(f"\n  cannot be kept: {problem}" for problem in trial.problems)
        raise
    row = FrameworkRow(framework=framework, source=source, spec=contents)
    version = request.version or row.version
    cuda = request.cuda or _cuda(trial.lock, source)
    if not version:
        raise UsageError(
            "framework-missing",
            f"{request.file.name} does not have the package '{framework}'",
            hint="choose a package of the lock: --framework NAME",
        )
    notes = [*trial.frozen.notes]
    skip = sorted({problem.name for problem in trial.problems if problem.name})
    count = sum(package.name not in skip for package in trial.frozen.packages)
    notes.append(
        f"frozen: {count} files of {request.file.name} are kept by their hashes, and nothing is solved"
    )
    if source == "pypi" and not minor_python(trial.frozen.python):
        notes.append(f"Python {trial.python} was chosen: {request.file.name} leaves it open")
    if source == "pypi" and trial.base.python != trial.python:
        notes.append(f"Python {trial.python} comes from conda-forge: no base carries it")
    if cuda == NO_CUDA:
        notes.append("the lock has no CUDA runtime, so the image is for CPUs")
    text = "# yaml-language-server: $schema=recipe.schema.json\n"
    for title, lines in (("Skipped", list(map(str, trial.problems))), ("Decisions", notes)):
        if lines:
            text += f"# From {show(request.file.name)[1:-1]}. {title}:\n"
            text += "".join(f"#   {re.sub('[^ -~]', '?', line)}\n" for line in lines)
    description = re.sub(r"[^A-Za-z0-9 .,;()/+_=-]", "_", f"{framework} and the files of {request.file.name}")
    text += f"family: {request.family}\ndescription: {description[:200]}\n"
    text += f"source: {source}\nframework: {framework}\n"
    if source == "conda":
        text += f"channels: [{', '.join(quoted(channel_name(c)) for c in trial.lock.channels)}]\n"
    text += f'platform: linux/amd64\nbase: {trial.base.name}\npython: "{trial.python}"\n'
    text += "\n# The images have the files of this lock, by their hashes. Nothing is solved.\n"
    text += f'frozen:\n  file: "{spec.file}"\n'
    text += f"  environment: {quoted(spec.environment)}\n" if spec.environment else ""
    for key, values in (("extras", spec.extras), ("groups", spec.groups), ("skip", skip)):
        text += f"  {key}: [{', '.join(map(quoted, values))}]\n" if values else ""
    if cuda != NO_CUDA:
        capabilities = ("8.0", "9.0") if natural(cuda) >= natural("11.8") else ("8.0",)
        text += "\n# The compute capabilities that every image of this family must support.\n"
        text += f"capabilities: [{', '.join(quoted(value) for value in capabilities)}]\n"
    if framework not in table.FRAMEWORKS:
        checks = [check for check in default_checks(framework) if cuda != NO_CUDA or check not in GPU_CHECKS]
        text += f"# What can be checked of any package; {framework} has no checks of its own.\n"
        text += f"checks: [{', '.join(checks)}]\n"
    written = cuda if cuda == NO_CUDA else f'"{cuda}"'
    text += f'\nmatrix:\n  - version: "{version}"\n    cuda: [{written}]\n'
    choice = ImageChoice(framework=framework, version=version, cuda=cuda, python=trial.python)
    return RecipeDraft(text=text, notes=tuple(notes), lost=tuple(map(str, trial.problems)), choice=choice)


def _public(version: str) -> str:
    """Return a version without its local part, which names the build."""
    return version.partition("+")[0]


def _cuda(lock: Lock, source: str) -> str:
    """Return the CUDA version of a lock, NO_CUDA without one."""
    if source == "conda":
        return conda_facts.cuda_version(lock) or wheel_facts.cuda_version(lock) or NO_CUDA
    return wheel_facts.cuda_version(lock) or NO_CUDA
