"""The stage from targets to locks: what is kept, what is stale, what is solved and written.

The rooms below `lock/` solve, read and write one lock; here is what a factory as a whole asks of them.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TypeAlias

from packaging.metadata import parse_email
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from imagefactory.access import Access, cache_lock, conda_channels, debian_mirror, package_index, uv_locker
from imagefactory.actions.build import BuildOptions, build_image, make_engine
from imagefactory.actions.definition import define_target
from imagefactory.actions.locked import base_locks, base_state, parent_lock, read_target_lock, require_lock
from imagefactory.build.layer_lock import changed_inputs, lock_layers
from imagefactory.errors import (
    LockError,
    OutdatedError,
    StaleError,
    StatementError,
    UnsolvableError,
    UsageError,
    os_problem,
)
from imagefactory.fs import explain_full_disk, replace_text, shared_use, temporary_directory
from imagefactory.gpu.capability import architecture
from imagefactory.lock import Locker, LockRequest, OutdatedPackage, files
from imagefactory.lock.conda import by_conda_lock
from imagefactory.lock.conda.locker import CondaLocker
from imagefactory.lock.conda.own_tool import CondaLockLocker, find_tool
from imagefactory.lock.content_hash import content_hash
from imagefactory.lock.debian import archive, lock
from imagefactory.lock.debian.archive import open_archive
from imagefactory.lock.debian.lock import read_base_lock
from imagefactory.lock.download import PackageCache
from imagefactory.lock.files import lock_names
from imagefactory.lock.layers import (
    format_layer_lock,
    layers_path,
    read_layer_lock,
    write_layer_lock,
    wrong_entries,
)
from imagefactory.lock.pypi.local import changed_wheel
from imagefactory.lock.pypi.outdated import PypiRelease, releases
from imagefactory.lock.pypi.system_libraries import MissingLibraries, find_lacking
from imagefactory.lock.pypi.unbuilt import installable
from imagefactory.lock.pypi.uv import UvLocker
from imagefactory.model import BaseLock, BaseSpec, BuildSpec, Lock, Target
from imagefactory.oci.manifests import Image
from imagefactory.progress import Progress
from imagefactory.project import Project, recipes_directory
from imagefactory.recipes.expand import requirement_places
from imagefactory.recipes.read import read_each
from imagefactory.recipes.values import channel_name, within
from imagefactory.serialize import format_value, parse_value
from imagefactory.settings.choices import SOLVERS

# --- What a lock's wheels need of the system and their base has not: told where the lock is made


def lacking_libraries(
    factory: Project, target: Target, lock: Lock, under: Lock | None
) -> tuple[MissingLibraries, ...]:
    """Of the wheels that are not `under`'s. None where what the base has is not known: it is pulled, or has
    no lock yet; and none for conda's targets, whose own packages have such libraries.

    Raises LockError for a base's lock that is malformed.
    """
    base = factory.base_of(target)
    known = None if base.image or lock.conda else read_base_lock(factory.base_lock_path(base))
    if known is None:
        return ()
    cache = PackageCache(factory.settings.cache_path, package_index(factory))
    below = {wheel.sha256 for wheel in under.wheels} if under else set()
    return find_lacking(
        (wheel for wheel in lock.wheels if wheel.sha256 not in below),
        (package.name for package in known.packages),
        lambda wheel: None if cache.missing((wheel,)) else cache.path(wheel),
    )


def parents_first(factory: Project, targets: Sequence[Target]) -> tuple[Target, ...]:
    """`targets` in an order in which each can be locked: after the one that it is built on."""

    def depth(target: Target) -> int:
        below = factory.target_below(target)
        return 1 + depth(below) if below else 0

    return tuple(sorted(targets, key=depth))


@dataclass(frozen=True, slots=True, kw_only=True)
class LockResult:
    """What `lock` did: `before` and `after` are the same object when nothing was solved.

    `behind` is what was locked far behind its newest release, below the packages that the recipe names.
    """

    target: Target
    before: Lock | None
    after: Lock
    behind: tuple[OutdatedPackage, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class LockOptions:
    """`update` names packages that may move, `update_all` lets every one move.

    `note` is written into the lock, None keeps the one that is there as long as the lock stays as it is.
    """

    update: tuple[str, ...] = ()
    update_all: bool = False
    note: str | None = None


Solution: TypeAlias = "tuple[Lock, tuple[OutdatedPackage, ...]]"
"""A lock that is not written yet, and what of it is far behind."""


def lock_target(
    factory: Project,
    target: Target,
    options: LockOptions,
    progress: Progress,
    solution: Solution | None = None,
) -> LockResult:
    """Solves the target's lock if anything that decides it has changed, and writes it.

    A `solution` of this very target is taken instead of another. Where there is no solution that is kept
    beside the locks, and a solution with an old release of what the recipe names counts as none. Raises
    UnsolvableError, LockError for a target below that has no lock, and what the solver's adapter raises.
    """
    _check_note(target, options.note)
    behind: tuple[OutdatedPackage, ...] = ()
    folder = factory.lock_folder
    request, kept = lock_request(factory, target, options, progress)
    base, under, before = request.base, request.under, request.previous
    decided = content_hash(target, base, under)
    current = before is not None and before.content_hash == decided
    if before is not None and kept:
        solved = replace(before, target=target.name)
    elif solution is not None and solution[0].content_hash == decided:
        solved, behind = solution
    else:
        try:
            solved, behind = solve_request(factory, request, progress)
        except UnsolvableError as error:
            if not current:
                why = files.UnsolvableTarget(
                    target=target.name,
                    content_hash=decided,
                    reason=error.message.removeprefix(f"{target.name}: "),
                    hint=error.hint,
                    tree=error.tree,
                )
                try:
                    files.write_unsolvable(folder, why)
                except LockError as unwritten:  # what was found is worth more than its record
                    progress.note(unwritten.message)
            error.message = _with_places(factory, target, error)
            raise
    after = _noted(before, solved, options.note, progress)
    if before is None or files.format_lock_files(after) != files.format_lock_files(before):
        files.write_lock(folder, after)
        if target.conda and target.source == "pypi" and not target.on:
            carried = f"has {base.python}" if base.python else "has none"
            channel = channel_name(target.channels[0])
            progress.note(
                f"{target.name}: Python {target.python} comes from {channel}, as {base.name} {carried}"
            )
        for one in lacking_libraries(factory, target, after, under):
            progress.note(one.told(base.name))
    else:
        after = before
        files.remove_unsolvable(folder, target.name)
    _write_outdated(factory, after, behind)
    return LockResult(target=target, before=before, after=after, behind=behind)


def lock_request(
    factory: Project, target: Target, options: LockOptions, progress: Progress
) -> tuple[LockRequest, bool]:
    """What locking a target asks of its solver, and whether its lock stays as it is instead."""
    base, under = factory.base_of(target), parent_lock(factory, target)
    try:
        before = read_target_lock(factory, target)
    except LockError as error:
        progress.note(f"{error.message}: locking {target.name} again")
        before = files.read_remains(factory.lock_folder, target)
    current = before is not None and before.content_hash == content_hash(target, base, under)
    if before is not None and current and (changed := changed_wheel(before, factory.settings.root_path)):
        progress.note(f"{changed}: locking {target.name} again")
        before, current = replace(before, content_hash=files.NOBODYS), False
    if before is not None and current:
        try:
            files.check_facts(before, target)
            files.check_unchanged_packages(before, under)
        except LockError as error:  # no lock is written so: somebody changed it
            progress.note(f"{error.message}: locking {target.name} again")
            before, current = replace(before, content_hash=files.NOBODYS), False
    request = LockRequest(
        target=target,
        base=base,
        previous=before,
        update=options.update,
        update_all=options.update_all,
        under=under,
    )
    return request, current and not options.update and not options.update_all


def solve_request(
    access: Access, request: LockRequest, progress: Progress, *, build: bool = False
) -> Solution:
    """A solution, and what of it is far behind. Nothing is written.

    Raises UnbuiltError where packages have no wheel, and with `build` where the newest releases of what the
    recipe names have none; OutdatedError for an old release of what it names, and what the solver's adapter
    raises.
    """
    target, locker = request.target, target_locker(access, request.target)
    solved = locker.lock(request, progress)
    behind = locker.behind(request, solved, progress)
    try:
        _check_not_outdated(target, behind)
    except OutdatedError:
        newest = tuple(f"{one.name}=={one.newest}" for one in behind if one.asked and one.build)
        wanted = replace(target, constraints=(*target.constraints, *newest))
        if build and newest and target.source == "pypi":
            with suppress(UnsolvableError):
                locker.lock(replace(request, target=wanted), progress)
        raise
    return solved, behind


def solve_target(
    factory: Project,
    target: Target,
    base: BaseSpec,
    progress: Progress,
    *,
    under: Lock | None = None,
    declared: bool = False,
    locker: UvLocker | None = None,
) -> Mapping[str, str]:
    """The versions that a lock of `target` would have, by name. Nothing is written.

    `under` is the lock of the target that it is built on. With `declared` packages of PyPI are solved by what
    they declare alone, which is quick. A `locker` that is given answers the same question only once. Raises
    UnsolvableError, UnreachableError, UnbuiltError (NoWheelError with `declared`), or what else the solver's
    adapter raises.
    """
    request = LockRequest(target=target, base=base, under=under)
    if target.source == "pypi" and not (under and under.conda):
        locker = locker or uv_locker(package_index(factory))
        pins = locker.versions(request, progress, declared=declared)
        for name, extra in () if declared else pins.lacking:
            progress.note(f"note: {name} has no extra '{extra}', so it is ignored")
        solved: dict[str, str] = dict(line.split("==", 1) for line in pins.lines)
        return {wheel.name: wheel.version for wheel in under.wheels} | solved if under else solved
    lock = target_locker(factory, target).lock(request, progress)
    return {package.name: package.version for package in lock.packages}


def explain_error(access: Access, target: Target, base: BaseSpec, error: LockError) -> LockError:
    """The error of a target of wheels with the requirements that contradict, as far as they are found."""
    return uv_locker(package_index(access)).reason(LockRequest(target=target, base=base), error)


def read_needs(access: Access, target: Target, base: BaseSpec, pin: str) -> tuple[str, ...]:
    """Requires-Dist of a release (`torch==2.7.1`) for a target's Python. Raises LockError."""
    locker = uv_locker(package_index(access))
    text = locker.metadata(pin, _empty_lock(locker, target, base))
    return tuple(parse_email(text)[0].get("requires_dist", []))


def read_releases(
    locker: UvLocker, target: Target, base: BaseSpec, names: Sequence[str]
) -> dict[str, tuple[PypiRelease, ...]]:
    """The releases of projects with their days, the oldest first; none where the index lists none."""
    listed = locker.projects(names, _empty_lock(locker, target, base))
    return {name: releases(name, files, target.python) for name, files in listed.items()}


def unknown_debian_packages(
    access: Access, base: BaseSpec, names: Sequence[str], progress: Progress
) -> tuple[str, ...]:
    """The names that the archive of a base has no package for. Raises LockError, ToolError."""
    mirror = debian_mirror(access)
    with open_archive(mirror, base.suite, architecture(base.platform), progress) as archive:
        return archive.unknown(names)


def has_wheels(locker: UvLocker, target: Target, base: BaseSpec, pin: str) -> bool:
    """Whether the index has a wheel for any Python 3 of a release, or of a package whose release is open."""
    name, _, version = pin.partition("==")
    files = locker.project(name, _empty_lock(locker, target, base))
    found = (re.fullmatch(r"[^-]+-([^-]+)-.*(?:py|cp)3[^-]*-[^-]+-[^-]+\.whl", one.filename) for one in files)
    return any(one and (not version or within(f"=={version}", one[1])) for one in found)


def impossible(locker: UvLocker, target: Target, base: BaseSpec) -> tuple[str, ...]:
    """The packages of which no release within the target's bounds has a wheel for its Python or a source."""
    bounds = {
        str(canonicalize_name(one.name)): one.specifier
        for one in map(Requirement, target.requirements)
        if any(bound.operator in ("<", "<=", "==", "~=") for bound in one.specifier)
    }
    lock = _empty_lock(locker, target, base)
    listed = locker.projects(tuple(bounds), lock)
    return tuple(
        name
        for name, files in listed.items()
        if files and not any(bounds[name].filter(installable(name, files, lock), prereleases=True))
    )


def _empty_lock(locker: UvLocker, target: Target, base: BaseSpec) -> Lock:
    return Lock(
        target=target.name,
        content_hash="",
        python=target.python,
        platform=locker.platform(target, base.glibc),
        solver="",
        wheels=(),
    )


def _with_places(factory: Project, target: Target, error: UnsolvableError) -> str:
    """The message of an error, each requirement that contradicts with its place in the recipe."""
    message = error.message
    if error.conflict:
        places = requirement_places(read_each(recipes_directory(factory.settings))[0], target)
        for text in error.conflict:
            if where := places.get(text):
                whole = rf"(?<![\w.-]){re.escape(text)}(?![\w.*<>=!~,-])"
                if found := re.search(whole, message):
                    message = f"{message[: found.end()]} ({where}){message[found.end() :]}"
    return message


def render_lock(factory: Project, target: Target, kind: str) -> tuple[str, str]:
    """The committed lock of a conda target as conda-lock renders it, and what of the lock is not in there.

    Raises UsageError for a target of wheels, and as `require_lock` and `by_conda_lock.render` do.
    """
    wheels = shlex.quote(str(factory.lock_folder / lock_names(target.name, conda=True)[1]))
    if not target.conda:
        raise UsageError(
            "target-without-conda",
            f"{target.name} has no conda packages",
            hint=f"its lock is a requirements file: pip install --no-deps -r {wheels}",
        )
    lock = require_lock(factory, target)
    left_out = (
        f"{len(lock.wheels)} packages from PyPI are not in it: add them to the environment with pip install "
    )
    left_out += f"--no-deps -r {wheels}"
    return by_conda_lock.render(lock, kind), left_out if lock.wheels else ""


def outdated_packages_of(access: Access, lock: Lock) -> tuple[OutdatedPackage, ...]:
    """What was found far behind when this lock was made on this machine; none where it was made elsewhere."""
    try:
        kept = json.loads(_outdated_path(access, lock).read_text(encoding="utf-8"))
        found: tuple[OutdatedPackage, ...] = parse_value(
            kept, tuple[OutdatedPackage, ...], "what is far behind"
        )
    except (OSError, ValueError, StatementError):
        return ()
    return found


def _write_outdated(access: Access, lock: Lock, behind: tuple[OutdatedPackage, ...]) -> None:
    """Beside the lock it would change the lock's digest, and so images, with each release of others."""
    if not behind:
        return
    path = _outdated_path(access, lock)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_text(path, json.dumps(format_value(behind, tuple[OutdatedPackage, ...]), indent=2) + "\n")
    except OSError as error:
        raise LockError(*os_problem("write", path, error), hint="check its permissions") from error


def _outdated_path(access: Access, lock: Lock) -> Path:
    return access.settings.cache_path / "behind" / f"{files.lock_digest(lock).removeprefix('sha256:')}.json"


def _check_not_outdated(target: Target, behind: Sequence[OutdatedPackage]) -> None:
    """Raises OutdatedError for what the recipe names; below that a lock may hold what is old."""
    if not (asked := [one for one in behind if one.asked]):
        return
    from_pypi = {canonicalize_name(Requirement(text).name) for text in target.pip}
    by_key: dict[str, list[str]] = {}
    # A release from before the first final one is what is left over, and nobody wants it.
    final = [one for one in asked if not (one.build and Version(one.locked).is_prerelease)]
    for one in final:
        by_key.setdefault("pip" if one.name in from_pypi else "constraints", []).append(f'"{one.accept}"')
    bounds = " and ".join(f"{' and '.join(some)} under '{key}'" for key, some in by_key.items())
    builds = list(dict.fromkeys(one.build for one in asked if one.build))
    newer = "change what excludes the newer release"
    if builds:
        newer = f"imagefactory lock {target.name} --build builds {' and '.join(builds)} from source"
    accept = f", or write {bounds} at {target.where} to accept the old release" if bounds else ""
    raise OutdatedError(
        "release-outdated",
        f"{target.name}: the lock would pin {', and '.join(map(str, asked))}",
        behind=tuple(asdict(one) for one in behind),
        hint=f"{newer}{accept}",
        tree="\n".join(map(str, behind)),
    )


def _noted(before: Lock | None, after: Lock, note: str | None, progress: Progress) -> Lock:
    """`after` with the note it shall have: what was said of other packages is not said of these."""
    if note is None:
        old = before.note if before else ""
        same = before is None or [p.sha256 for p in before.packages] == [p.sha256 for p in after.packages]
        if same or not old:
            return replace(after, note=old)
        progress.note(
            f"{after.target}: the packages changed, so the note '{old}' was removed (--note sets a new one)"
        )
        return replace(after, note="")
    return replace(after, note=note.strip())


def _check_note(target: Target, note: str | None) -> None:
    if note and not target.conda:
        raise UsageError(
            "note-not-supported",
            f"{target.name}: only a lock with conda packages can have a note",
            hint=f"write it as a comment in the recipe ({target.where})",
        )
    if note and (len(note) > 300 or not note.isprintable()):
        raise UsageError(
            "option-invalid",
            "--note must be one line of at most 300 characters",
            hint='for example --note "tested on an A100"',
        )


def lock_base(factory: Project, base: BaseSpec, progress: Progress, *, update: bool) -> bool:
    """Solves a base's lock when there is none, when it is stale, or on `update`; True when it changed.

    A base that is pulled has no lock but its digest, which only its recipe changes.
    """
    if base.image:
        return False
    path, lower = factory.base_lock_path(base), factory.base_below(base)
    if lower and base_state(factory, lower) != "ok":
        lock_base(factory, lower, progress, update=False)
    below = lock.read_base_lock(factory.base_lock_path(lower)) if lower else None
    try:
        before = lock.read_base_lock(path)
    except LockError as error:
        progress.note(f"{error.message}: locking {base.name} again")
        before = None
    if before is not None and before.content_hash == lock.base_content_hash(base, below) and not update:
        return False
    after = archive.lock_base(base, before, debian_mirror(factory), progress, below=below, update=update)
    if after == before:
        return False
    lock.write_base_lock(path, after)
    return True


def conda_locker(access: Access) -> CondaLocker:
    """What solves conda's packages in this process, and reads what their channels have."""
    index, records = package_index(access), access.settings.cache_path / "channels"
    return CondaLocker(conda_channels(access), records, lambda: uv_locker(index))


def target_locker(access: Access, target: Target) -> Locker:
    """What solves the target's packages, and knows where they are."""
    index = package_index(access)
    if not target.conda:
        return uv_locker(index)
    if (solver := access.settings.solver.value) == SOLVERS[0]:
        return conda_locker(access)
    channels, records = conda_channels(access), access.settings.cache_path / "channels"
    tool = find_tool(solver, access.environ)
    return CondaLockLocker(tool, channels, records, lambda: uv_locker(index))


# --- The stage from a lock to its layer lock: written of what a build makes, checked by making it all anew


FETCHED = ("conda", "debs", "wheels")
"""What a cache holds of files that are locked by hash. The rest of it was made here."""
OPTIONS = BuildOptions(engine="assemble", locked=True, smoke=False, held=False)


def lock_target_layers(factory: Project, target: Target, progress: Progress) -> bool:
    """Builds the target's layers, as far as the store does not have them, and writes its layer lock.

    True where that changed. Raises what a build raises, and UsageError for a target on an image of others.
    """
    definition, bases = define_target(factory, target), _base_locks(factory, target)
    image = _build(factory, definition, progress)
    lock = lock_layers(definition, bases, image, _build_tools(factory, definition))
    path = layers_path(factory.lock_folder, target.name)
    if path.exists() and path.read_text(encoding="utf-8", errors="replace") == format_layer_lock(lock):
        return False
    write_layer_lock(factory.lock_folder, lock)
    return True


def check_target_layers(factory: Project, target: Target, progress: Progress) -> None:
    """Makes every layer of the target anew, its base's too, in a store that ends with the call, and compares.

    Raises LockError for a layer lock that is missing or has wrong entries, which it names, StaleError for one
    of another lock, base or set of tools.
    """
    definition, bases = define_target(factory, target), _base_locks(factory, target)
    lock, path = (
        read_layer_lock(factory.lock_folder, target.name),
        layers_path(factory.lock_folder, target.name),
    )
    again = f"imagefactory lock --deep {target.name}"
    if lock is None:
        raise LockError("layer-lock-missing", f"{target.name} has no layer lock ({path})", hint=again)
    if moved := changed_inputs(lock, definition, bases):
        raise StaleError("layer-lock-outdated", f"{path} is outdated: {moved}", hint=again)
    if lock.made_with != (here := _build_tools(factory, definition)):
        raise StaleError(
            "layer-lock-outdated",
            f"{path} is of layers by {lock.made_with}, and this machine has {here}",
            hint=again,
        )
    with _from_scratch(factory, progress) as elsewhere:
        made = _build(elsewhere, definition, progress)
    if wrong := wrong_entries(lock, made.layers, str(path)):
        raise LockError(
            "layer-lock-mismatch",
            "\n".join(wrong),
            hint=f"{again}, or check out the file of another commit",
        )


def _base_locks(factory: Project, target: Target) -> tuple[BaseLock, ...]:
    base = factory.base_of(target)
    if base.image:
        raise UsageError(
            "option-conflict",
            f"--deep requires a base that imagefactory builds, and {target.name} is on {base.image}",
            hint="omit --deep",
        )
    if not (locks := base_locks(factory, base)):
        raise LockError(
            "lock-missing", f"base {base.name} has no lock", hint=f"imagefactory lock base:{base.name}"
        )
    return locks


def _build_tools(factory: Project, definition: BuildSpec) -> str:
    return make_engine(factory, OPTIONS.engine).made_with(definition)


def _build(factory: Project, definition: BuildSpec, progress: Progress) -> Image:
    image = build_image(factory, definition, OPTIONS, progress).image
    assert isinstance(image, Image)
    return image


@contextmanager
def _from_scratch(factory: Project, progress: Progress) -> Iterator[Project]:
    """The factory with a store that holds nothing yet, and a cache that holds what was fetched alone."""
    layout, cache = factory.layout, factory.settings.cache_path
    with (
        layout.in_use(progress),
        shared_use(cache_lock(factory), progress),
        explain_full_disk(layout.path),
        _scratch(layout.tmp) as folder,
    ):
        for name in FETCHED:
            (cache / name).mkdir(parents=True, exist_ok=True)
            (folder / "cache").mkdir(exist_ok=True)
            (folder / "cache" / name).symlink_to((cache / name).absolute())
        settings = replace(
            factory.settings,
            store=replace(factory.settings.store, value=str(folder / "store")),
            cache=replace(factory.settings.cache, value=str(folder / "cache")),
        )
        yield replace(factory, settings=settings)


@contextmanager
def _scratch(parent: Path) -> Iterator[Path]:
    parent.mkdir(parents=True, exist_ok=True)
    with temporary_directory("layers-", parent) as folder:
        yield folder
