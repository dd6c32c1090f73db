"""Solve and write the locks of targets and bases, then their layer locks."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypedDict
from urllib.parse import urlsplit

from packaging.metadata import parse_email
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from imagefactory.access import Access, cache_lock, conda_channels, debian_mirror, package_index, uv_locker
from imagefactory.actions.build import (
    BuildOptions,
    RegistrySources,
    base_request,
    build_image,
    make_engine,
)
from imagefactory.actions.definition import define_target
from imagefactory.actions.locked import (
    locked_base,
    locked_target,
    outdated_path,
    read_target_lock,
    require_lock,
)
from imagefactory.build.layer_lock import changed_inputs, lock_layers
from imagefactory.errors import (
    DownloadError,
    ImagefactoryError,
    LockError,
    OutdatedError,
    RegistryError,
    StaleError,
    ToolError,
    UnreachableError,
    UnsolvableError,
    UsageError,
    os_problem,
    redact,
    without_logins,
)
from imagefactory.fs import explain_full_disk, replace_text, shared_use, temporary_directory
from imagefactory.gpu.capability import architecture
from imagefactory.http import HttpError, HttpSession, RetryPolicy
from imagefactory.lock import Locker, LockRequest, OutdatedPackage, export, files
from imagefactory.lock.changes import publisher_changes
from imagefactory.lock.debian import archive
from imagefactory.lock.debian.archive import open_archive
from imagefactory.lock.debian.lock import deb_filename, read_base_lock, write_base_lock
from imagefactory.lock.download import PackageCache
from imagefactory.lock.layers import (
    format_layer_lock,
    layers_path,
    read_layer_lock,
    write_layer_lock,
    wrong_entries,
)
from imagefactory.lock.pypi.outdated import PypiRelease, releases
from imagefactory.lock.pypi.requirements import from_files, from_indexes
from imagefactory.lock.pypi.system_libraries import MissingLibraries, find_lacking
from imagefactory.lock.pypi.unbuilt import installable
from imagefactory.model import (
    BaseLock,
    BaseSpec,
    BuildSpec,
    DebianPackage,
    Lock,
    LockedCondaPackage,
    LockedPackage,
    ReleaseCutoff,
    Target,
)
from imagefactory.oci.manifests import Image
from imagefactory.plugins import load_extra
from imagefactory.progress import Progress, QuietProgress
from imagefactory.project import Project, recipes_directory
from imagefactory.recipes.expand import requirement_places
from imagefactory.recipes.read import read_each
from imagefactory.recipes.values import channel_name, cutoff_of, longest_cooldown, parse_cutoff, within
from imagefactory.serialize import format_value
from imagefactory.settings.choices import SOLVERS

if TYPE_CHECKING:
    from imagefactory.lock.conda.locker import CondaLocker
    from imagefactory.lock.pypi.uv import UvLocker


def lacking_libraries(
    project: Project, target: Target, lock: Lock, parent: Lock | None
) -> tuple[MissingLibraries, ...]:
    """Return the libraries that the target's own wheels need and its base lacks.

    None if the packages of the base are unknown (pulled, or not locked); empty for conda targets, whose
    packages include such libraries. Raises LockError for a malformed base lock.
    """
    base = project.base_of(target)
    base_lock = None if base.image or lock.conda else read_base_lock(project.base_lock_path(base))
    if base_lock is None:
        return ()
    cache = PackageCache(project.settings.cache_path, package_index(project))
    inherited = {wheel.sha256 for wheel in parent.wheels} if parent else set()
    return find_lacking(
        (wheel for wheel in lock.wheels if wheel.sha256 not in inherited),
        (package.name for package in base_lock.packages),
        lambda wheel: None if cache.missing((wheel,)) else cache.path(wheel),
    )


def parents_first(project: Project, targets: Sequence[Target]) -> tuple[Target, ...]:
    """Return `targets` in a possible order of locking: parents first."""

    def depth(target: Target) -> int:
        parent = project.target_below(target)
        return 1 + depth(parent) if parent else 0

    return tuple(sorted(targets, key=depth))


@dataclass(frozen=True, slots=True, kw_only=True)
class LockResult:
    """A target's lock before and after, the same object if nothing was solved.

    `behind` lists the outdated packages that the recipe does not name.
    """

    target: Target
    before: Lock | None
    after: Lock
    behind: tuple[OutdatedPackage, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class LockOptions:
    """Options of locking. `update` names packages to upgrade, `update_all` upgrades all.

    `note` is written into the lock. With None the current note stays while the packages stay.
    `exclude_newer` is a date, a time or an age (`parse_cutoff`); it replaces cooldowns. None means those of
    the recipe and the settings.
    """

    update: tuple[str, ...] = ()
    update_all: bool = False
    note: str | None = None
    exclude_newer: str | None = None


Solution: TypeAlias = "tuple[Lock, tuple[OutdatedPackage, ...]]"
"""A lock that is not written yet, and its outdated packages."""


def lock_target(
    project: Project,
    target: Target,
    options: LockOptions,
    progress: Progress,
    solution: Solution | None = None,
) -> LockResult:
    """Solve and write the target's lock if any of its inputs has changed.

    With `solution` nothing is solved. Without a solution the reason is written next to the locks; an
    outdated release of a package in the recipe is such a reason. Raises UnsolvableError, LockError for a
    parent without a lock, and the solver's errors.
    """
    _check_note(target, options.note)
    if target.frozen and (options.update or options.update_all):
        raise UsageError(
            "target-frozen",
            f"the packages of {target.name} are the files of {target.frozen.file}, and are not solved",
            hint=f"upgrade them there, and run imagefactory lock {target.name}; to solve them, import the "
            "file again without --frozen",
        )
    outdated: tuple[OutdatedPackage, ...] = ()
    request, current = lock_request(project, target, options, progress)
    base, before = request.base, request.previous
    if current and before and target.frozen and (names := _frozen_difference(project, target, before)):
        progress.note(
            f"{target.name} differs from {target.frozen.file} in {', '.join(names)}: it is locked again"
        )
        current = False
    if before is not None and current:
        solved = replace(before, target=target.name)
    elif solution is not None and solution[0].content_hash == request.content_hash:
        solved, outdated = solution
    else:
        try:
            solved, outdated = solve_request(project, request, progress)
        except UnsolvableError as error:
            if before is None or before.content_hash != request.content_hash:
                _write_unsolvable(project.lock_folder, request, error, progress)
            error.message = _with_places(project, target, error)
            raise
    same = before and (before.content_hash, before.packages) == (solved.content_hash, solved.packages)
    if before and same and (before.cutoff or options.exclude_newer is None):
        solved = replace(solved, cutoff=before.cutoff)  # another date alone would change the digest
    after = _noted(before, solved, options.note, progress)
    if before is None or files.format_lock_files(after) != files.format_lock_files(before):
        files.write_lock(project.lock_folder, after)
        if target.conda and target.source == "pypi" and not target.on:
            python = f"has {base.python}" if base.python else "has none"
            channel = channel_name(target.channels[0])
            progress.note(
                f"{target.name}: Python {target.python} comes from {channel}, as {base.name} {python}"
            )
        for missing in lacking_libraries(project, target, after, request.under):
            progress.note(missing.message(base.name))
    else:
        after = before
        files.remove_unsolvable(project.lock_folder, target.name)
    _write_outdated(project, after, outdated)
    return LockResult(target=target, before=before, after=after, behind=outdated)


def _write_unsolvable(
    directory: Path, request: LockRequest, error: UnsolvableError, progress: Progress
) -> None:
    name = request.target.name
    record = files.UnsolvableTarget(
        target=name,
        content_hash=request.content_hash,
        reason=error.message.removeprefix(f"{name}: "),
        hint=error.hint,
        tree=error.tree,
    )
    try:
        files.write_unsolvable(directory, record)
    except LockError as problem:  # the reason itself is more important than its record
        progress.note(problem.message)


def lock_request(
    project: Project, target: Target, options: LockOptions, progress: Progress
) -> tuple[LockRequest, bool]:
    """Return the solver's request for a target, and whether its current lock stays unchanged."""
    locked = locked_target(project, target)
    previous = locked.lock
    if locked.flaw:
        progress.note(f"{locked.flaw.message}: locking {target.name} again")
        directory = project.lock_folder
        previous = (
            replace(previous, content_hash=files.NOBODYS)
            if previous
            else files.read_remains(directory, target)
        )
    request = LockRequest(
        target=target,
        base=locked.base.base,
        previous=previous,
        update=options.update,
        update_all=options.update_all,
        under=locked.parent.require(project.lock_folder) if locked.parent else None,
        cutoff=release_cutoff(project, target, previous, options),
    )
    stays = locked.current and not options.update and not options.update_all
    if options.exclude_newer is not None and previous:
        stays = stays and request.cutoff == previous.cutoff
    return request, stays


def release_cutoff(
    access: Access, target: Target, previous: Lock | None, options: LockOptions
) -> ReleaseCutoff | None:
    """Return the cutoff of a solve for a target, None for releases of any age.

    Without `update_all`, the cutoff of the previous lock applies if it is later, and its exceptions stay
    except for the packages to update. Raises UsageError.
    """
    now = datetime.now(UTC)
    if target.frozen:
        if options.exclude_newer is not None:
            raise UsageError(
                "option-conflict",
                f"{target.name} has the files of {target.frozen.file}, so --exclude-newer does not apply",
                hint="omit --exclude-newer, or remove 'frozen' from the recipe",
            )
        return None
    if options.exclude_newer is not None:
        return parse_cutoff(options.exclude_newer, now)
    cutoff = cutoff_of(longest_cooldown((target.cooldown, access.settings.cooldown.value)), now)
    before = previous.cutoff if previous and not options.update_all else None
    if before is None:
        return cutoff
    stay = set(before.allowed) - set(map(canonicalize_name, options.update))
    return ReleaseCutoff(
        time=max(before.time, cutoff.time) if cutoff else before.time,
        allowed=tuple(sorted({*stay, *(cutoff.allowed if cutoff else ())})),
    )


def frozen_part(target: Target, name: str) -> Any:
    """Return a function of the importers for a target whose packages are another tool's lock.

    Raises ToolError if this extra was deleted.
    """
    if (part := load_extra(f"importers.frozen:{name}")) is None:
        where = target.frozen.where if target.frozen else target.where
        raise ToolError(
            "extra-not-installed",
            f"{target.name}: 'frozen' at {where} needs the importers, which this installation lacks",
            hint="install imagefactory again",
        )
    return part


def frozen_state(project: Project, target: Target, state: str) -> str:
    """Return the state of a target's lock, compared with the file of another tool if its recipe names one.

    `state` is that of the lock itself. Raises LockError for an unreadable file.
    """
    if target.frozen and state == "ok":
        names = _frozen_difference(project, target, require_lock(project, target))
        return f"differs from {target.frozen.file} in {', '.join(names)}" if names else state
    return state


def _frozen_difference(project: Project, target: Target, lock: Lock) -> tuple[str, ...]:
    names: tuple[str, ...] = frozen_part(target, "frozen_difference")(project, target, lock)
    return names


def solve_request(
    access: Access, request: LockRequest, progress: Progress, *, build: bool = False
) -> Solution:
    """Return a solution and its outdated packages. Writes nothing.

    Raises UnbuiltError if packages have no wheel, and with `build` also if the newest releases of the
    recipe's packages have none. Raises OutdatedError for an outdated package of the recipe, and the solver's
    errors.
    """
    target = request.target
    if target.frozen:
        progress.note(f"{target.name}: it gets the files of {target.frozen.file}, and nothing is solved")
        if access.settings.publishers.value == "strict":
            progress.note(f"{target.name}: the publishers of its wheels are not checked")
        return frozen_part(target, "freeze")(access, request, progress), ()
    locker = target_locker(access, target)
    try:
        solved = locker.lock(request, progress)
    except UnsolvableError as error:
        raise _explain_cutoff(locker, request, error) from error
    outdated = locker.behind(request, solved, progress)
    if request.cutoff:
        outdated = (*outdated, *_excluded_releases(locker, request, solved, progress))
    try:
        _check_not_outdated(target, outdated)
    except OutdatedError:
        newest = tuple(f"{row.name}=={row.newest}" for row in outdated if row.named and row.build)
        newer = replace(target, constraints=(*target.constraints, *newest))
        if build and newest and target.source == "pypi":
            with suppress(UnsolvableError):
                locker.lock(replace(request, target=newer), progress)
        raise
    if solved.wheels:
        solved = _with_publishers(access, request, solved, locker, progress)
    return solved, outdated


def _with_publishers(
    access: Access, request: LockRequest, solved: Lock, locker: Locker, progress: Progress
) -> Lock:
    """Return a solution with the publishers of its wheels. Those of files of the previous locks stay.

    Raises LockError for an invalid attestation. With `publishers = "strict"` it raises LockError for a
    changed or lost publisher, and the error that prevented a check.
    """
    setting, known = access.settings.publishers, dict[str, str]()
    locks = [lock for lock in (request.previous, request.under) if lock]
    for lock in locks:
        files_of_lock = {wheel.name: wheel.sha256 for wheel in lock.wheels}
        known |= {
            wheel.name: publisher
            for wheel in solved.wheels
            if files_of_lock.get(wheel.name) == wheel.sha256
            and (publisher := dict(lock.publishers).get(wheel.name))
        }
    # The wheels of the parent were checked when it was locked.
    inherited = {wheel.name for wheel in request.under.wheels} if request.under else set()
    unknown = [wheel for wheel in solved.wheels if wheel.name not in inherited | known.keys()]
    strict = setting.value == "strict"
    if unknown and setting.value != "off":
        report = locker.publishers(unknown, solved, progress)
        known |= report.known
        if problem := report.problem:
            if strict:
                raise problem
            access.tell(f"{problem.message}; {problem.hint}")
        elif not report.attests and setting.origin != "default":
            access.tell("publishers of wheels are not known: the index serves no attestations (PEP 740)")
    solved = replace(solved, publishers=tuple(sorted(known.items())))
    if strict and (changes := publisher_changes(request.previous, solved)):
        raise LockError(
            "publisher-changed",
            f"{request.target.name}: {'; '.join(map(str, changes))}",
            hint="confirm with the project that this is intended. To accept it, run "
            f"IMAGEFACTORY_PUBLISHERS=record imagefactory lock {request.target.name}",
        )
    return solved


def _excluded_releases(
    locker: Locker, request: LockRequest, solved: Lock, progress: Progress
) -> tuple[OutdatedPackage, ...]:
    """Return the newer releases that a solution would have without the cutoff. Raises like `lock`."""
    try:
        free = locker.lock(replace(request, cutoff=None), QuietProgress())
    except UnsolvableError as error:
        progress.note(f"{request.target.name}: releases after the cutoff are not known: {error.message}")
        return ()
    locked = {package.name: package for package in solved.packages}
    others = [p for p in free.packages if p.name in locked and p.version != locked[p.name].version]
    return tuple(
        OutdatedPackage(
            name=package.name,
            locked=locked[package.name].version,
            newest=package.version,
            reason=excluded_reason(uploaded),
            accept="",
            named=False,
            uploaded=f"{uploaded:%Y-%m-%dT%H:%M:%SZ}",
        )
        for package, uploaded in _after_cutoff(locker, request, free, others)
    )


def _after_cutoff(
    locker: Locker, request: LockRequest, lock: Lock, packages: Sequence[LockedPackage]
) -> Iterator[tuple[LockedPackage, datetime]]:
    """Yield the packages of a lock that were uploaded after the cutoff of a request, with their times."""
    uploads = locker.uploads(packages, lock, request.target) if packages else {}
    for package in packages:
        time = uploads.get(package.filename)
        if request.cutoff and time and time > request.cutoff.time:
            yield package, time.astimezone(UTC)


def excluded_reason(uploaded: datetime) -> str:
    """Return the reason why a release was not locked, with its age."""
    return f"it is {format_age(uploaded)} old, which is too new"


def format_age(time: datetime) -> str:
    """Return the time since `time` in hours, or days from 48 hours on."""
    hours = int((datetime.now(UTC) - time).total_seconds() // 3600)
    number, unit = (hours // 24, "day") if hours >= 48 else (hours, "hour")
    return f"{number} {unit}{'' if number == 1 else 's'}"


def _explain_cutoff(locker: Locker, request: LockRequest, error: UnsolvableError) -> UnsolvableError:
    """Return the error of a request, or another one if only the cutoff prevents a solution."""
    if request.cutoff is None:
        return error
    try:
        free = locker.lock(replace(request, cutoff=None), QuietProgress())
        young = list(_after_cutoff(locker, request, free, free.packages))
    except LockError:
        return error
    below = {package.filename for package in request.under.packages} if request.under else set()
    young = [row for row in young if row[0].filename not in below]
    young = [row for row in young if canonicalize_name(row[0].name) not in request.cutoff.allowed]
    if not young:
        return error
    requests = (*request.target.requirements, *request.target.pip)
    named = {canonicalize_name(re.split(r"[^A-Za-z0-9_.-]", text, maxsplit=1)[0]) for text in requests}
    young = [row for row in young if canonicalize_name(row[0].name) in named] or young
    texts = [f"{package.name} {package.version} ({format_age(time)} old)" for package, time in young]
    more = f" and {len(texts) - 5} more" if len(texts) > 5 else ""
    names = {*request.cutoff.allowed, *(canonicalize_name(package.name) for package, _ in young)}
    accepted = replace(request.cutoff, allowed=tuple(sorted(names)))
    return UnsolvableError(
        "releases-too-new",
        f"{request.target.name}: there is a solution only with releases after "
        f"{request.cutoff.time:%Y-%m-%d %H:%M} UTC: {', '.join(texts[:5])}{more}",
        hint=f'wait, or accept them: imagefactory lock {request.target.name} --exclude-newer "{accepted}"',
        tree=error.tree,
        conflict=error.conflict,
    )


def solve_target(
    project: Project,
    target: Target,
    base: BaseSpec,
    progress: Progress,
    *,
    parent_lock: Lock | None = None,
    declared: bool = False,
    locker: UvLocker | None = None,
) -> Mapping[str, str]:
    """Return the versions that a lock of `target` would have, by name. Writes nothing.

    `parent_lock` is the lock of the parent. With `declared` PyPI packages are solved only by their declared
    metadata, which is fast. Pass the same `locker` again to reuse its answers. Raises UnsolvableError,
    UnreachableError, UnbuiltError (NoWheelError with `declared`), or the solver's errors.
    """
    cutoff = release_cutoff(project, target, None, LockOptions())
    request = LockRequest(target=target, base=base, under=parent_lock, cutoff=cutoff)
    if target.source == "pypi" and not (parent_lock and parent_lock.conda):
        locker = locker or uv_locker(package_index(project))
        pins = locker.versions(request, progress, declared=declared)
        for name, extra in () if declared else pins.lacking:
            progress.note(f"note: {name} has no extra '{extra}', so it is ignored")
        inherited = {wheel.name: wheel.version for wheel in parent_lock.wheels} if parent_lock else {}
        return inherited | pins.versions
    lock = target_locker(project, target).lock(request, progress)
    return {package.name: package.version for package in lock.packages}


def explain_error(access: Access, target: Target, base: BaseSpec, error: LockError) -> LockError:
    """Return the error of a wheel target, with the contradicting requirements if the solver finds them."""
    return uv_locker(package_index(access)).reason(LockRequest(target=target, base=base), error)


def read_needs(access: Access, target: Target, base: BaseSpec, pin: str) -> tuple[str, ...]:
    """Return Requires-Dist of a release (`torch==2.7.1`) for a target's Python. Raises LockError."""
    locker = uv_locker(package_index(access))
    text = locker.metadata(pin, _empty_lock(locker, target, base))
    return tuple(parse_email(text)[0].get("requires_dist", []))


def read_releases(
    locker: UvLocker, target: Target, base: BaseSpec, names: Sequence[str]
) -> dict[str, tuple[PypiRelease, ...]]:
    """Return the releases of projects with their days, the oldest first."""
    listed = locker.projects(names, _empty_lock(locker, target, base))
    return {name: releases(name, files, target.python) for name, files in listed.items()}


def unknown_debian_packages(
    access: Access, base: BaseSpec, names: Sequence[str], progress: Progress
) -> tuple[str, ...]:
    """Return the names that are not packages in the archive of a base. Raises LockError, ToolError."""
    mirror = debian_mirror(access)
    with open_archive(mirror, base.suite, architecture(base.platform), progress) as archive:
        return archive.unknown(names)


def has_wheels(locker: UvLocker, target: Target, base: BaseSpec, pin: str) -> bool:
    """Return whether the index has a wheel of a pin for any Python 3; a bare name means any release."""
    name, _, version = pin.partition("==")
    files = locker.project(name, _empty_lock(locker, target, base))
    pattern = r"[^-]+-([^-]+)-.*(?:py|cp)3[^-]*-[^-]+-[^-]+\.whl"
    matches = (re.fullmatch(pattern, file.filename) for file in files)
    return any(match and (not version or within(f"=={version}", match[1])) for match in matches)


def impossible(locker: UvLocker, target: Target, base: BaseSpec) -> tuple[str, ...]:
    """Return the packages that have neither a wheel nor a source within the target's bounds."""
    bounds = {
        str(canonicalize_name(need.name)): need.specifier
        for need in map(Requirement, target.requirements)
        if any(bound.operator in ("<", "<=", "==", "~=") for bound in need.specifier)
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


def _with_places(project: Project, target: Target, error: UnsolvableError) -> str:
    """Return the error's message with the recipe location of each contradicting requirement."""
    message = error.message
    if error.conflict:
        places = requirement_places(read_each(recipes_directory(project.settings))[0], target)
        for text in error.conflict:
            whole = rf"(?<![\w.-]){re.escape(text)}(?![\w.*<>=!~,-])"
            if (location := places.get(text)) and (match := re.search(whole, message)):
                message = f"{message[: match.end()]} ({location}){message[match.end() :]}"
    return message


def render_lock(project: Project, target: Target, kind: str) -> tuple[str, str]:
    """Return the committed lock of a target in a format of `export.FORMATS`, and what it omits.

    The index is queried for the addresses of wheels. Raises UsageError for a format that cannot contain the
    target's packages, and as `require_lock` and the functions of `export` do.
    """
    if kind in export.OF_CONDA and not target.conda:
        raise UsageError(
            "target-without-conda",
            f"{target.name} has no conda packages",
            hint="use --render pylock or --render requirements",
        )
    lock = require_lock(project, target)
    if kind in ("pylock", "requirements") and not lock.wheels:
        raise UsageError(
            "target-without-wheels",
            f"{target.name} has no packages from PyPI",
            hint="use --render conda-lock, --render pixi or --render explicit",
        )
    if kind not in export.WITH_WHEELS:
        omitted = f"{len(lock.wheels)} packages from PyPI are not in it: --render requirements prints them"
        return export.render(lock, kind), omitted if lock.wheels else ""
    index, local = package_index(project), from_files(lock.origins)
    if kind in export.OF_CONDA:
        if local:
            raise UsageError(
                "option-conflict",
                f"{next(iter(local.values()))} is a wheel of the project, which --render {kind} cannot name",
                hint="use --render requirements",
            )
        urls = _public_addresses(project, lock)
        if kind == "pixi":
            return export.format_pixi(lock, urls, uv_locker(index).main_address() if urls else ""), ""
        return export.format_conda_lock_file(lock, urls), ""
    omitted = (
        f"{len(lock.conda)} conda packages are not in it: --render explicit prints them" if lock.conda else ""
    )
    named = from_indexes(lock.origins)
    indexes = {name: without_logins(index.address(other, name)) for name, other in named.items()}
    if kind == "requirements":
        return export.format_requirements(lock, local, sorted(set(indexes.values()))), omitted
    main = uv_locker(index).main_address()
    remote = {wheel.name: indexes.get(wheel.name, main) for wheel in lock.wheels if wheel.name not in local}
    return export.format_pylock(lock, _public_addresses(project, lock), remote), omitted


def _public_addresses(project: Project, lock: Lock) -> dict[str, str]:
    """Return the address of each wheel by file name, without users and passwords.

    A wheel of the project has its path.
    """
    local = from_files(lock.origins)
    paths = {wheel.filename: local[wheel.name] for wheel in lock.wheels if wheel.name in local}
    remote = replace(
        lock,
        conda=(),
        wheels=tuple(wheel for wheel in lock.wheels if wheel.name not in local),
        origins=tuple(pair for pair in lock.origins if pair[0] not in local),
    )
    urls = uv_locker(package_index(project)).addresses(remote) if remote.wheels else {}
    return paths | {name: without_logins(url) for name, url in urls.items()}


def _write_outdated(access: Access, lock: Lock, outdated: tuple[OutdatedPackage, ...]) -> None:
    # Not in the lock: each release of others would change its digest, and so the images.
    if not outdated:
        return
    path = outdated_path(access, lock)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_text(path, json.dumps(format_value(outdated, tuple[OutdatedPackage, ...]), indent=2) + "\n")
    except OSError as error:
        raise LockError(*os_problem("write", path, error), hint="check its permissions") from error


def _check_not_outdated(target: Target, outdated: Sequence[OutdatedPackage]) -> None:
    """Raise OutdatedError for outdated packages that the recipe names. Others may be outdated."""
    if not (named := [row for row in outdated if row.named]):
        return
    from_pypi = {canonicalize_name(Requirement(text).name) for text in target.pip}
    by_key: dict[str, list[str]] = {}
    for row in named:
        # A release from before the first final one is only a remainder, and never worth accepting.
        if not (row.build and Version(row.locked).is_prerelease):
            by_key.setdefault("pip" if row.name in from_pypi else "constraints", []).append(f'"{row.accept}"')
    bounds = " and ".join(f"{' and '.join(some)} under '{key}'" for key, some in by_key.items())
    builds = list(dict.fromkeys(row.build for row in named if row.build))
    newer = "change the requirement that excludes the newer release"
    if builds:
        newer = f"imagefactory lock {target.name} --build builds {' and '.join(builds)} from source"
    accept = f", or write {bounds} at {target.where} to accept the old release" if bounds else ""
    raise OutdatedError(
        "release-outdated",
        f"{target.name}: the lock would pin {', and '.join(map(str, named))}",
        outdated=tuple(row.as_json() for row in outdated),
        hint=f"{newer}{accept}",
        tree="\n".join(map(str, outdated)),
    )


def _noted(before: Lock | None, after: Lock, note: str | None, progress: Progress) -> Lock:
    """Return `after` with its note. The note of a lock with other packages is dropped."""
    if note is None:
        note = before.note if before else ""
        if note and before and [p.sha256 for p in before.packages] != [p.sha256 for p in after.packages]:
            progress.note(
                f"{after.target}: the packages changed, so the note '{note}' was removed "
                "(--note sets a new one)"
            )
            note = ""
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
            hint='shorten it, for example --note "tested on an A100"',
        )


def lock_base(project: Project, base: BaseSpec, progress: Progress, *, update: bool) -> bool:
    """Solve a base's lock if it is missing or outdated, or `update` is set. Return whether it changed.

    The lock of a pulled base is its digest, which only its recipe changes.
    """
    if base.image:
        return False
    locked = locked_base(project, base)
    if locked.parent and locked.parent.state != "ok":
        lock_base(project, locked.parent.base, progress, update=False)
        locked = locked_base(project, base)
    if locked.flaw:
        progress.note(f"{locked.flaw.message}: locking {base.name} again")
    if locked.state == "ok" and not update:
        return False
    parent = locked.parent.lock if locked.parent else None
    after = archive.lock_base(base, locked.lock, debian_mirror(project), progress, parent_base=parent)
    if after != locked.lock:
        write_base_lock(project.base_lock_path(base), after)
    return after != locked.lock


FileSource: TypeAlias = Literal["debian", "index", "channel"]


class MissingFileRow(TypedDict):
    """A locked file that no reachable place has any more."""

    file: str
    source: FileSource
    locks: list[str]
    """Names of targets, and of bases as `base:NAME`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Availability:
    """The locked files that no place has. `unknown` are the errors of places that could not be read."""

    missing: tuple[MissingFileRow, ...]
    unknown: tuple[ImagefactoryError, ...]


def check_available(
    project: Project, bases: Sequence[BaseSpec], targets: Sequence[Target], progress: Progress
) -> Availability:
    """Look for each locked file of bases and targets in the archive, snapshots, index and channels.

    Only indexes are read, and each conda archive has one HEAD request. Files that none has are searched
    where `push --with-sources` puts them. The cache of this machine does not count. Files of the project, and
    locks that cannot be read, are skipped: `--check` reports those.
    """
    locks: dict[str, Lock] = {}
    base_locks: dict[str, BaseLock] = {}
    for target in targets:
        with suppress(LockError):
            if lock := read_target_lock(project, target):
                locks[target.name] = lock
    for base in bases:
        with suppress(LockError):
            base_locks |= {lock.base: lock for lock in locked_base(project, base).locks}
    names: dict[tuple[str, FileSource], set[str]] = {}
    unknown: dict[str, ImagefactoryError] = {}

    def search(name: str, source: FileSource, find: Callable[[], Iterable[str]]) -> None:
        try:
            for file in find():
                names.setdefault((file, source), set()).add(name)
        except (LockError, DownloadError, ToolError, UsageError) as error:
            unknown.setdefault(error.message, error)

    debs: dict[str, set[DebianPackage]] = {}
    for name, base_lock in base_locks.items():
        search(f"base:{name}", "debian", partial(_missing_debs, project, base_lock, debs, progress))
    if any(lock.wheels for lock in locks.values()):
        locker = uv_locker(package_index(project))
        with progress.task("locks in the index", total=len(locks), unit="locks") as task:
            for name, lock in locks.items():
                search(name, "index", partial(_missing_wheels, locker, lock))
                task.advance(1)
    conda = {package.url: package for lock in locks.values() for package in lock.conda}
    lost = _missing_archives(project, tuple(conda.values()), unknown, progress) if conda else frozenset[str]()
    for name, lock in locks.items():
        search(name, "channel", partial(lost.intersection, [package.url for package in lock.conda]))
    _search_registry(project, targets, locks, (names, debs), progress)
    rows = tuple(
        MissingFileRow(file=file, source=source, locks=sorted(some))
        for (file, source), some in sorted(names.items())
        if some
    )
    return Availability(missing=rows, unknown=tuple(unknown.values()))


def _search_registry(
    project: Project,
    targets: Sequence[Target],
    locks: Mapping[str, Lock],
    missing: tuple[Mapping[tuple[str, FileSource], set[str]], Mapping[str, set[DebianPackage]]],
    progress: Progress,
) -> None:
    """Remove from `missing` what a build would find in the registry: locks by file, and .debs by base."""
    names, debs = missing
    for target in targets:
        lock = locks.get(target.name)
        if lock is None:
            continue
        sources = RegistrySources(project, target, lock)
        packages = {
            package.sha256: (package, names[key])
            for package in lock.packages
            if target.name in names.get(key := _file_key(package), ())
        }
        parents = locked_base(project, project.base_of(target)).locks
        bases = [row.base for row in parents if debs.get(row.base)]
        if not packages and not bases:
            continue
        sizes = {sha256: package.size for sha256, (package, _) in packages.items()}
        for sha256 in sources.packages(sizes, progress) if sizes else ():
            packages[sha256][1].discard(target.name)
        for base in bases:
            try:
                usable = sources.usable(sorted(debs[base], key=lambda row: row.name), (), progress)
            except RegistryError as error:
                progress.note(f"base:{base}: {error.message}")
                continue
            for package in usable:
                names[deb_filename(package), "debian"].discard(f"base:{base}")
            debs[base].difference_update(usable)


def _file_key(package: LockedPackage) -> tuple[str, FileSource]:
    if isinstance(package, LockedCondaPackage):
        return package.url, "channel"
    return package.filename, "index"


def _missing_debs(
    project: Project, lock: BaseLock, missing: dict[str, set[DebianPackage]], progress: Progress
) -> list[str]:
    gone, lost = archive.unavailable_packages(lock, lock.packages, debian_mirror(project), progress)
    missing[lock.base] = set(lost)
    if len(gone) > len(lost):
        progress.note(f"base:{lock.base}: {len(gone) - len(lost)} packages are only in snapshots")
    return [deb_filename(package) for package in lost]


def _missing_wheels(locker: UvLocker, lock: Lock) -> list[str]:
    return [wheel.filename for wheel in locker.unavailable(lock)]


def _missing_archives(
    access: Access,
    packages: Sequence[LockedCondaPackage],
    unknown: dict[str, ImagefactoryError],
    progress: Progress,
) -> frozenset[str]:
    """Return the addresses of conda packages that their channels lack, or have with another size."""
    channels = conda_channels(access)

    def is_lost(package: LockedCondaPackage) -> bool:
        host = urlsplit(package.url).netloc
        try:
            return host not in unknown and web.size(channels.address(package.url)) != package.size
        except HttpError as error:
            if error.status in (404, 410):
                return True
            unknown.setdefault(
                host,
                UnreachableError(
                    "channel-unreachable",
                    redact(str(error)),
                    hint="check the network, and the settings channels and certificates",
                ),
            )
            return False
        finally:
            task.advance(1)

    with (
        HttpSession(channels, retry_policy=RetryPolicy(attempts=3)) as web,
        progress.task("conda archives", total=len(packages), unit="packages") as task,
        ThreadPoolExecutor(8) as pool,
    ):
        lost = list(pool.map(is_lost, packages))
    return frozenset(package.url for package, gone in zip(packages, lost, strict=True) if gone)


def conda_locker(access: Access) -> CondaLocker:
    """Return the conda solver of this process, which reads channels."""
    index, records = package_index(access), access.settings.cache_path / "channels"
    from imagefactory.lock.conda.locker import CondaLocker

    return CondaLocker(conda_channels(access), records, lambda: uv_locker(index))


def target_locker(access: Access, target: Target) -> Locker:
    """Return the solver of the target's packages."""
    index = package_index(access)
    if not target.conda:
        return uv_locker(index)
    if (solver := access.settings.solver.value) == SOLVERS[0]:
        return conda_locker(access)
    channels, records = conda_channels(access), access.settings.cache_path / "channels"
    from imagefactory.lock.conda.own_tool import CondaLockLocker, find_tool

    tool = find_tool(solver, access.environ)
    return CondaLockLocker(tool, channels, records, lambda: uv_locker(index))


# --- Layer locks: written from a build, checked by building every layer again

FETCHED = ("conda", "debs", "wheels")
"""Directories of the cache with files that are locked by hash. The other directories are built locally."""
OPTIONS = BuildOptions(engine="assemble", locked=True, smoke=False, held=False)


def lock_target_layers(project: Project, target: Target, progress: Progress) -> bool:
    """Build the layers that the store lacks, and write the target's layer lock. Return whether it changed.

    Raises the errors of a build, and UsageError for a target on a pulled base.
    """
    definition, bases = define_target(project, target), _base_locks(project, target)
    image = _build(project, definition, progress)
    lock = lock_layers(definition, bases, image, _build_tools(project, definition))
    path = layers_path(project.lock_folder, target.name)
    if path.exists() and path.read_text(encoding="utf-8", errors="replace") == format_layer_lock(lock):
        return False
    write_layer_lock(project.lock_folder, lock)
    return True


def check_target_layers(project: Project, target: Target, progress: Progress) -> None:
    """Build every layer of the target and its base again, in a temporary store, and compare.

    Raises LockError if the layer lock is missing or has wrong entries. Raises StaleError if it is for
    another lock, base or set of tools.
    """
    definition, bases = define_target(project, target), _base_locks(project, target)
    lock = read_layer_lock(project.lock_folder, target.name)
    path = layers_path(project.lock_folder, target.name)
    again = f"imagefactory lock --layers {target.name}"
    if lock is None:
        raise LockError("layer-lock-missing", f"{target.name} has no layer lock ({path})", hint=again)
    if moved := changed_inputs(lock, definition, bases):
        raise StaleError("layer-lock-outdated", f"{path} is outdated: {moved}", hint=again)
    if lock.toolchain != (here := _build_tools(project, definition)):
        problem = f"{path} is for layers by {lock.toolchain}, but this machine has {here}"
        raise StaleError("layer-lock-outdated", problem, hint=again)
    with _from_scratch(project, progress) as elsewhere:
        image = _build(elsewhere, definition, progress)
    if wrong := wrong_entries(lock, image.layers, str(path)):
        hint = f"{again}, or check out the file of another commit"
        raise LockError("layer-lock-mismatch", "\n".join(wrong), hint=hint)


def _base_locks(project: Project, target: Target) -> tuple[BaseLock, ...]:
    base = project.base_of(target)
    if base.image:
        raise UsageError(
            "option-conflict",
            f"--layers requires a base that imagefactory builds, and {target.name} is on {base.image}",
            hint="omit --layers",
        )
    return base_request(project, base, locked=True).locks


def _build_tools(project: Project, definition: BuildSpec) -> str:
    return make_engine(project, OPTIONS.engine).toolchain(definition)


def _build(project: Project, definition: BuildSpec, progress: Progress) -> Image:
    image = build_image(project, definition, OPTIONS, progress).image
    assert isinstance(image, Image)
    return image


@contextmanager
def _from_scratch(project: Project, progress: Progress) -> Iterator[Project]:
    """Yield the project with an empty store, and a cache with only fetched files."""
    layout, cache = project.layout, project.settings.cache_path
    with (
        layout.in_use(progress),
        shared_use(cache_lock(project), progress),
        explain_full_disk(layout.path),
    ):
        layout.tmp.mkdir(parents=True, exist_ok=True)
        with temporary_directory("layers-", layout.tmp) as directory:
            for name in FETCHED:
                (cache / name).mkdir(parents=True, exist_ok=True)
                (directory / "cache").mkdir(exist_ok=True)
                (directory / "cache" / name).symlink_to((cache / name).absolute())
            settings = replace(
                project.settings,
                store=replace(project.settings.store, value=str(directory / "store")),
                cache=replace(project.settings.cache, value=str(directory / "cache")),
            )
            yield replace(project, settings=settings)
