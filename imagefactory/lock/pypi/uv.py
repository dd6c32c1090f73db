"""Solve wheels with uv.

A lock has one wheel with one hash for each package: the exact file that will be in the image.
"""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from copy import copy
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path
from threading import Lock as ThreadLock

from packaging.metadata import parse_email
from packaging.utils import canonicalize_name, parse_wheel_filename
from packaging.version import InvalidVersion, Version

from imagefactory.errors import (
    LockError,
    ToolError,
    UnsolvableError,
    extra_hint,
    os_problem,
    own_pip_command,
    redact,
    without_logins,
)
from imagefactory.gpu.capability import MACHINES
from imagefactory.http import HttpError, HttpSession
from imagefactory.lock import LockRequest, OutdatedPackage, PublisherReport
from imagefactory.lock.pypi.explain import explain_conflict, explain_failure, explain_on, unreachable_error
from imagefactory.lock.pypi.facts import check_facts, check_single_cuda
from imagefactory.lock.pypi.index import (
    IndexFile,
    PackageIndex,
    files_before,
    no_upload_time,
    project_files,
    read_publishers,
)
from imagefactory.lock.pypi.no_wheel import NoWheelError, without_wheel, working_versions
from imagefactory.lock.pypi.offers import (
    IndexWheel,
    address_of,
    best_offer,
    choose,
    fetch_sdist,
    parse_pylock,
    read_metadata,
    reusable_wheels,
)
from imagefactory.lock.pypi.outdated import find_outdated
from imagefactory.lock.pypi.question import (
    PinnedVersions,
    WheelRequest,
    check_exclude,
    check_update_names,
    origins_of,
    versions_of,
)
from imagefactory.lock.pypi.requirements import digest, from_files, from_indexes, misfit
from imagefactory.lock.pypi.unbuilt import (
    companion_needs,
    require_wheels,
    solve_companions,
    with_needs,
    without,
)
from imagefactory.model import Lock, LockedPackage, LockedWheel, Target
from imagefactory.progress import Progress
from imagefactory.recipes.values import package_of

_PROJECT = "imagefactory-asked"
_LOCAL = "factory.wheels"  # unlike any name of the settings
# Settings of uv that a machine may not decide, unlike its index, certificates and caches.
_SOLVE = (
    "--only-binary=:all:",
    "--resolution=highest",
    "--prerelease=if-necessary-or-explicit",
    "--index-strategy=first-index",
    "--no-header",
    "--annotation-style=split",
)
# The errors of a locked file that its index lacks.
_GONE = ("index-file-changed", "locked-file-gone")
# sysconfig, by which uv's package finds its program, is not safe for two threads that call it first.
_FINDING = ThreadLock()


def write_requirements(directory: Path, requirements: Iterable[str], lock: Lock, index: PackageIndex) -> Path:
    """Write the file in `directory` with `requirements` (PEP 508) and the origins of `lock.origins`.

    Their order stays: of two packages that compete, uv selects the newest release of the first one. The file
    is a project if some have another origin, because only a project ties a package to one index. Local
    wheels are such an index too, so that no path of this machine gets into uv's output. Raises UsageError
    for an index whose address this machine does not know, LockError as `local_wheels` does.
    """
    lines = list(dict.fromkeys(requirements))
    names = set(map(package_of, lines))
    origins = tuple(pair for pair in lock.origins if pair[0] in names)
    if not origins:
        path = directory / "asked.txt"
        path.write_text(requirement_lines(lines))
        return path
    named, files = from_indexes(origins), from_files(origins)
    addresses = {name: index.address(name, f"{lock.target}: {package}") for package, name in named.items()}
    flat = directory / "wheels"
    for wheel in local_wheels(replace(lock, origins=tuple(files.items())), index.root):
        flat.mkdir(exist_ok=True)
        (flat / wheel.filename).symlink_to(index.root.absolute() / files[wheel.name])
    text = [
        f'[project]\nname = "{_PROJECT}"\nversion = "0"\ndependencies = {json.dumps(lines)}',
        # Else uv would search the directories above, where anyone could have created one.
        "[tool.uv.workspace]\nmembers = []",
        "[tool.uv.sources]",
        *(f"{package} = {{ index = {json.dumps(name)} }}" for package, name in named.items()),
        *(f"{package} = {{ index = {json.dumps(_LOCAL)} }}" for package in files),
    ]
    for name, url in addresses.items():
        text.append(f"[[tool.uv.index]]\nname = {json.dumps(name)}\nurl = {json.dumps(url)}\nexplicit = true")
    if files:
        text.append(
            f'[[tool.uv.index]]\nname = {json.dumps(_LOCAL)}\nurl = "{flat.as_uri()}"\nformat = "flat"'
            "\nexplicit = true"
        )
    path = directory / "pyproject.toml"
    path.write_text(requirement_lines(text))
    return path


def cutoff_options(lock: Lock) -> list[str]:
    """Return uv's options for the lock's cutoff. uv excludes files of its second, we include them."""
    if lock.cutoff is None:
        return []
    time = lock.cutoff.time + timedelta(seconds=1)
    allowed = (f"--exclude-newer-package={name}=false" for name in lock.cutoff.allowed)
    return [f"--exclude-newer={time:%Y-%m-%dT%H:%M:%SZ}", *allowed]


def read_via(solution: str) -> dict[str, tuple[str, ...]]:
    """Return the packages that require each package, from uv's comments in a compiled file."""
    requirers: dict[str, tuple[str, ...]] = {}
    name = ""
    for line in solution.splitlines():
        if "==" in line and not line.startswith(" "):
            name = package_of(line)
        elif by := re.fullmatch(r" +# +(?:via +)?([A-Za-z0-9][A-Za-z0-9._-]*)", line):
            requirers[name] = (*requirers.get(name, ()), package_of(by[1]))
    return {name: tuple(p for p in by if p not in ("via", _PROJECT)) for name, by in requirers.items()}


def requirement_lines(entries: Iterable[str]) -> str:
    """Return a line for each entry."""
    return "".join(f"{entry}\n" for entry in entries)


def plain_uv_message(message: str) -> str:
    """Return uv's message about the project in the wording for plain requirements."""
    return message.replace(f"{_PROJECT} depends on", "you require")


class UvLocker:
    """Solves with uv, the program in its PyPI package.

    `python` is the interpreter that uv queries about this machine. The target's own is only simulated.
    """

    def __init__(self, index: PackageIndex, *, python: Path) -> None:
        self._index = index
        self._python = python
        self._platforms: list[tuple[str, str]] = []
        self._version, self._pages_at = "", ""
        self._solved: dict[WheelRequest, PinnedVersions | NoWheelError] = {}
        self._listed: dict[str, frozenset[str]] = {}
        self._page_of: dict[tuple[LockedWheel, str], str] = {}
        self._read: dict[str, tuple[IndexFile, ...]] = {}

    def require(self) -> str:
        """Return uv's version. Raises ToolError without uv."""
        if not self._version:
            result = self._run(["--version"])
            match = re.search(r"\d+\.\d+\.\d+\S*", result.stdout)
            if result.returncode != 0 or not match:
                raise ToolError(
                    "uv-not-working",
                    f"cannot start uv: {(result.stderr or result.stdout).strip()[:200]}",
                    hint=own_pip_command("install", "--force-reinstall uv"),
                )
            self._version = match[0]
        return self._version

    def lock(self, request: LockRequest, progress: Progress) -> Lock:
        """Solve the lock of a target.

        Previous pins are preferences: packages change only if they must. Every wheel of the parent stays.
        Raises UnsolvableError without a solution, LockError if it differs from the target's values,
        ToolError without uv.
        """
        target, parent_lock, question = request.target, request.under, self.question(request)
        try:
            with without(request.absent, question) as reduced:
                complete, pins = require_wheels(self, reduced, target, progress)
            lock = replace(complete.lock, wheels=self.wheels(complete, pins, progress))
        except (UnsolvableError, NoWheelError) as error:
            reason = self.explained(error, question, target)
            if parent_lock and isinstance(reason, UnsolvableError):
                reason = explain_on(reason, parent_lock, target)
            raise reason from error
        check_facts(lock, target)
        return lock

    def reason(self, request: LockRequest, error: LockError) -> LockError:
        """Return the error of a request with the contradicting requirements, and a hint that was solved."""
        return self.explained(error, self.question(request), request.target)

    def explained(self, error: LockError, question: WheelRequest, target: Target) -> LockError:
        """Return the error of a request with the contradicting requirements, and a hint that was solved."""
        if isinstance(error, NoWheelError):
            pin = without_wheel(error.account)
            if pin and (files := self.project(pin.partition("==")[0], question.lock)):
                works = working_versions(pin, files, question.lock)
                error.hint = f"images contain only wheels, and {works}"
        elif isinstance(error, UnsolvableError) and not error.conflict:
            return explain_conflict(self, question, error, (canonicalize_name(target.framework),))
        return error

    def versions(self, request: LockRequest, progress: Progress, *, declared: bool = False) -> PinnedVersions:
        """Return the versions that a lock would have, without their files. Raises like `lock`.

        With `declared` only declared metadata counts, with companions of the framework. Sources are not
        read, and NoWheelError is raised for packages without a wheel.
        """
        try:
            question = self.question(request)
            if declared:
                return solve_companions(self, question)[1]
            return require_wheels(self, question, request.target, progress)[1]
        except UnsolvableError as error:
            raise explain_on(error, request.under, request.target) if request.under else error from error

    def question(self, request: LockRequest) -> WheelRequest:
        """Return the request to uv for a target.

        Raises LockError for names that cannot be updated or excluded.
        """
        target, parent_lock = request.target, request.under
        empty = Lock(
            target=target.name,
            content_hash=request.content_hash,
            python=target.python,
            platform=parent_lock.platform if parent_lock else self.platform(target, request.base.glibc),
            solver=f"uv {self.require()}",
            wheels=(),
            origins=origins_of(target, parent_lock),
            cutoff=request.cutoff,
        )
        return WheelRequest(
            lock=empty,
            requirements=target.requirements,
            constraints=target.constraints,
            previous=request.previous,
            update=check_update_names(request),
            update_all=request.update_all,
            fixed=parent_lock.wheels if parent_lock else (),
            sources=target.sources,
            exclude=check_exclude(request),
        )

    def behind(self, request: LockRequest, lock: Lock, progress: Progress) -> tuple[OutdatedPackage, ...]:
        """Return the outdated packages of a solution. Raises like `lock`."""
        question = with_needs(self.question(request), companion_needs(versions_of(lock.wheels), lock.python))
        return find_outdated(self, question, lock.wheels, request.target.framework, progress)

    def wheels(
        self, question: WheelRequest, pins: PinnedVersions, progress: Progress
    ) -> tuple[LockedWheel, ...]:
        """Return the exact wheels of a solution, sorted by name.

        A file of `question.previous` stays while its version does and the index has it. Raises LockError for
        a package without a fitting wheel.
        """
        offers = self.offers(pins.lines, question.lock)
        reusable = reusable_wheels(question.previous, question.lock, question.update)
        chosen = choose(offers, question.lock, reusable, lambda name: self.project(name, question.lock))
        chosen = self.sizes(chosen, offers, progress)
        fixed = {wheel.name for wheel in question.fixed}
        local = [w for w in local_wheels(question.lock, self._index.root) if w.name not in fixed]
        wheels = tuple(sorted((*question.fixed, *chosen, *local), key=lambda wheel: wheel.name))
        check_single_cuda(question.lock.target, wheels, pins.via)
        return wheels

    def empty_lock(self, name: str, python: str, platform: str) -> Lock:
        """Return a lock without packages, to solve for a Python on the newest Linux of a platform."""
        machine = MACHINES[platform]
        return Lock(
            target=name,
            content_hash="",
            python=python,
            platform=f"manylinux_2_{self._minor(machine, '2.99', name)}_{machine}",
            solver=f"uv {self.require()}",
            wheels=(),
        )

    def located(self, question: WheelRequest) -> dict[LockedWheel, str]:
        """Return the wheels of a solution as declared, each with its URL. Raises LockError.

        Unlike in a lock, packages may be built for several CUDA versions.
        """
        offers = self.offers(self.solve(question).lines, question.lock)
        best = [best_offer(files, question.lock) for files in offers.values()]
        located = {pair[0]: pair[1] for pair in best if pair}
        with self._web(f"{question.lock.target}: cannot read the size of a wheel") as web:
            return {
                replace(wheel, size=offer.size or web.size(offer.url)): offer.url
                for wheel, offer in located.items()
            }

    def addresses(self, lock: Lock) -> dict[str, str]:
        """Return the current URL of each locked wheel by file name. It may have the index's credentials.

        A file is identified by its hash: a better wheel uploaded later changes nothing, and a yanked version
        is still found. Raises LockError for a file that the index no longer has or has changed.
        """
        lock = replace(lock, cutoff=None)  # a locked file may be as new as it is
        offers = self.offers([f"{wheel.name}=={wheel.version}" for wheel in lock.wheels], lock)
        local = self._local_urls(lock)
        urls = {
            wheel.filename: local.get(wheel.name) or address_of(wheel, offers.get(wheel.name, ()), lock)
            for wheel in lock.wheels
        }
        if missing := [wheel for wheel in lock.wheels if not urls[wheel.filename]]:
            listed = self.listed(missing, lock)  # uv does not list all files
            for wheel in missing:
                files = [
                    IndexWheel(filename=file.filename, url=file.url, sha256=file.sha256, size=None)
                    for file in listed.get(wheel, ())
                ]
                urls[wheel.filename] = address_of(wheel, files, lock)
                if not urls[wheel.filename]:
                    raise LockError(
                        "locked-file-gone",
                        f"{lock.target}: the index no longer has {wheel.filename} "
                        f"(sha256 {wheel.sha256[:12]}...)",
                        hint=f"run imagefactory lock {lock.target} --upgrade-package {wheel.name}",
                    )
        return urls

    def main_address(self) -> str:
        """Return the address of the main index without users and passwords, uv's built-in one if none is set.

        Raises ToolError.
        """
        if self._index.url:
            return without_logins(self._index.url)
        result = self._run(["pip", "compile", "-", "--emit-index-url", "--no-header", "--offline", "--quiet"])
        match = re.search(r"^--index-url (\S+)$", result.stdout, re.MULTILINE)
        if match is None:
            raise ToolError(
                "index-not-set",
                "uv does not say which package index it uses",
                hint='write index = "ADDRESS" in imagefactory.toml',
            )
        return without_logins(match[1])

    def _local_urls(self, lock: Lock) -> dict[str, str]:
        root = self._index.root.absolute()
        return {name: (root / path).as_uri() for name, path in from_files(lock.origins).items()}

    def solve(self, question: WheelRequest) -> PinnedVersions:
        """Return uv's solution without fixed and given packages. Raises UnsolvableError, ToolError.

        A request is solved once, except one with directories, whose files may change.
        """
        key = replace(question, sources=())
        if question.stubs or question.sdists:
            return self._solve(key)
        if key not in self._solved:
            try:
                self._solved[key] = self._solve(key)
            except NoWheelError as error:
                self._solved[key] = error
        answer = self._solved[key]
        if isinstance(answer, NoWheelError):
            raise copy(answer)
        return answer

    def _solve(self, question: WheelRequest) -> PinnedVersions:
        # A pin among the requirements also lets uv use a version that was yanked later.
        fixed = tuple(f"{wheel.name}=={wheel.version}" for wheel in question.fixed)
        with _scratch() as directory:
            bounds = directory / "bounds.txt"
            bounds.write_text(requirement_lines(dict.fromkeys((*question.constraints, *question.given))))
            options = [f"--constraints={bounds}", *(f"--upgrade-package={name}" for name in question.update)]
            if question.lock.cutoff:  # packages of the parent and of conda have their versions already
                names = map(package_of, (*fixed, *question.given))
                options += [f"--exclude-newer-package={name}=false" for name in dict.fromkeys(names)]
            options += [f"--find-links={links}" for links in (question.stubs, question.sdists) if links]
            if question.previous and not question.update_all:  # uv prefers versions of the file it replaces
                pins = (f"{wheel.name}=={wheel.version}" for wheel in question.previous.wheels)
                (directory / "out.txt").write_text(requirement_lines(pins))
            if question.exclude:  # a requirement that applies nowhere, in place of those of others
                overrides = directory / "overrides.txt"
                never = (f"{name}; sys_platform == 'never'" for name in question.exclude)
                overrides.write_text(requirement_lines(never))
                options.append(f"--overrides={overrides}")
            requirements = (*question.requirements, *fixed)
            solution, messages = self._compile(directory, requirements, question.lock, *options)
        elsewhere = {package_of(pin) for pin in (*fixed, *question.given)}
        lines = [line for line in solution.splitlines() if "==" in line and not line.startswith(" ")]
        lacking = re.findall(
            r"The package `([^`=]+)==[^`]*` does not have an extra named `([^`]+)`", messages
        )
        return PinnedVersions(
            lines=tuple(pin for pin in lines if package_of(pin) not in elsewhere),
            lacking=tuple(sorted({(canonicalize_name(name), extra) for name, extra in lacking})),
            via=read_via(solution),
        )

    def requirers(self, question: WheelRequest, wheels: Sequence[LockedWheel]) -> dict[str, tuple[str, ...]]:
        """Return the packages that require each package of a solution. Raises LockError."""
        pins = tuple(f"{wheel.name}=={wheel.version}" for wheel in wheels)
        return self.solve(replace(question, constraints=(*question.constraints, *pins))).via

    def metadata(self, pin: str, lock: Lock) -> str:
        """Return METADATA of the wheel that fits a pin (`name==version`).

        Raises LockError if the index has no such wheel, or no metadata of it.
        """
        offers = self.offers([pin], lock)
        best = best_offer((offer for files in offers.values() for offer in files), lock)
        if best is None:
            problem = f"{lock.target}: the index has no wheel of {pin} for this Python and platform"
            raise LockError("wheel-not-found", problem, hint="use another version of this package")
        with self._web(f"{lock.target}: cannot read the metadata of {pin}") as web:
            return read_metadata(web, best[1].url)

    def reach(self) -> None:
        """Query the index for one project, as solving would. Raises LockError if it does not answer."""
        with _scratch() as directory:
            path = directory / "asked.txt"
            path.write_text("pip\n")
            options = ["--no-deps", "--no-cache", "--quiet", f"--python={self._python}"]
            result = self._run(["pip", "compile", str(path), *options])
        # An index without that project has answered too.
        if result.returncode and "not found in the" not in result.stderr:
            raise unreachable_error(result.stderr, self._index)

    def offers(self, pins: Iterable[str], lock: Lock) -> dict[str, tuple[IndexWheel, ...]]:
        """Return the fitting files of the index for each pin (`name==version`), by normalized name."""
        local = from_files(lock.origins)
        remote = tuple(pin for pin in pins if package_of(pin) not in local)
        if not remote:
            return {}
        with _scratch() as directory:
            options, out = ("--no-deps", "--format=pylock.toml"), "pylock.toml"
            text, _ = self._compile(directory, remote, lock, *options, out=out)
            return parse_pylock(text, directory / out, lock.target)

    def _compile(
        self, directory: Path, requirements: Iterable[str], lock: Lock, *options: str, out: str = "out.txt"
    ) -> tuple[str, str]:
        """Return the text that uv writes to `out` in `directory`, and its messages. Raises LockError."""
        path = write_requirements(directory, requirements, lock, self._index)
        machine = next(machine for machine in MACHINES.values() if lock.platform.endswith(f"_{machine}"))
        glibc = lock.platform.removesuffix(f"_{machine}").removeprefix("manylinux_").replace("_", ".")
        result = self._run(
            [
                *("pip", "compile", str(path), *options, f"--output-file={directory / out}", *_SOLVE),
                *(("--no-sources",) if path.suffix == ".txt" else ()),
                *cutoff_options(lock),
                f"--python={self._python}",
                f"--python-version={lock.python}",
                f"--python-platform={machine}-manylinux_2_{self._minor(machine, glibc, lock.target)}",
            ]
        )
        if lock.cutoff and (undated := re.search(r"`(\S+)` is missing an upload date", result.stderr)):
            raise no_upload_time(lock, undated[1], package_of(undated[1].partition("-")[0]))
        if result.returncode != 0:
            raise explain_failure(lock, plain_uv_message(result.stderr), self._index)
        return (directory / out).read_text(), result.stderr

    def source(self, file: IndexFile, directory: Path) -> Path:
        """Return a source distribution of the index, in the cache or in `directory`. Raises DownloadError."""
        return fetch_sdist(self._index, file, self._index.sdists or directory)

    @property
    def root(self) -> Path:
        """The directory of the project, for relative paths of a request."""
        return self._index.root

    def project(self, name: str, lock: Lock) -> tuple[IndexFile, ...]:
        """Return the files of a project without a wheel, none if the index does not list them.

        imagefactory builds the address of its page, because uv would run the code of a project without a
        wheel.
        """
        return self.projects((name,), lock)[name]

    def projects(self, names: Sequence[str], lock: Lock) -> dict[str, tuple[IndexFile, ...]]:
        """Return the files of several projects, read at the same time."""
        from_index = from_indexes(lock.origins)
        pip = LockedWheel(name="pip", version="24.0", filename="", sha256="", size=0)

        def page_of(wheel: LockedWheel) -> str:
            try:
                return self._pages((wheel,), lock)[wheel]
            except LockError:  # an index without that project may have others
                return f"{self._index.url.rstrip('/')}/{wheel.name}/" if self._index.url else ""
            except KeyError:
                return ""

        if not self._pages_at and any(name not in from_index for name in names):
            self._pages_at = page_of(pip).removesuffix("pip/")
        pages = {name: self._pages_at and f"{self._pages_at}{name}/" for name in names}
        pages |= {name: page_of(replace(pip, name=name)) for name in names if name in from_index}

        def read(page: str) -> tuple[IndexFile, ...]:
            try:
                return project_files(web, page) if page else ()
            except HttpError:
                return ()

        with HttpSession(self._index) as web, ThreadPoolExecutor(8) as pool:
            files = zip(pages, pool.map(read, pages.values()), strict=True)
            return {name: files_before(name, rows, lock) for name, rows in files}

    def _run(self, arguments: list[str]) -> subprocess.CompletedProcess[str]:
        try:
            from uv import find_uv_bin

            with _FINDING:
                program = find_uv_bin()
        except (ImportError, FileNotFoundError) as error:
            raise ToolError("extra-not-installed", "uv is not installed", hint=extra_hint("build")) from error
        # From `/`: uv reads a uv.toml of the present directory and of those above, and in a shared temporary
        # directory anyone could have put one.
        return subprocess.run(
            [program, *arguments],
            capture_output=True,
            text=True,
            cwd="/",
            env=dict(self._index.environment),
            check=False,
            stdin=subprocess.DEVNULL,
        )

    def platform(self, target: Target, glibc: str) -> str:
        """Return the newest manylinux platform that uv knows and `glibc` (`2.36`) supports."""
        machine = MACHINES.get(target.platform)
        if machine is None:
            raise LockError(
                "lock-platform-unsupported",
                f"{target.name}: platform '{target.platform}' cannot be locked",
                hint=f"supported platforms: {', '.join(MACHINES)}",
            )
        return f"manylinux_2_{self._minor(machine, glibc, target.name)}_{machine}"

    def _minor(self, machine: str, glibc: str, target: str) -> int:
        """Return the newest C library `2.<minor>` that uv has a platform for and `glibc` supports."""
        if not self._platforms:
            help_text = self._run(["pip", "compile", "--help"]).stdout
            self._platforms = re.findall(r"(\w+)-manylinux_2_(\d+)", help_text)
        known = [int(minor) for name, minor in self._platforms if name == machine]
        fitting = [minor for minor in known if minor <= int(glibc.partition(".")[2])]
        if not fitting:
            raise LockError(
                "lock-platform-unsupported",
                f"{target}: uv has no platform for glibc {glibc} on {machine}",
                hint=own_pip_command("install", "--upgrade uv"),
            )
        return max(fitting)

    @contextmanager
    def _web(self, problem: str) -> Iterator[HttpSession]:
        """Open a session with the index. Raises LockError with `problem` if reading fails."""
        try:
            with HttpSession(self._index) as web:
                yield web
        except (HttpError, OSError, zipfile.BadZipFile, KeyError) as error:
            raise LockError(
                "index-read-failed",
                f"{problem}: {redact(str(error))}",
                hint="run the same command again later",
            ) from error

    def sizes(
        self,
        wheels: tuple[LockedWheel, ...],
        offers: Mapping[str, tuple[IndexWheel, ...]],
        progress: Progress,
    ) -> tuple[LockedWheel, ...]:
        """Return the wheels with their sizes, from the index or from its server."""
        known = {offer.sha256: offer for files in offers.values() for offer in files}
        with (
            self._web("cannot read the size of a wheel") as web,
            progress.task("sizes", total=len(wheels), unit="packages") as task,
            ThreadPoolExecutor(8) as pool,
        ):

            def sized(wheel: LockedWheel) -> LockedWheel:
                size = wheel.size or known[wheel.sha256].size or web.size(known[wheel.sha256].url)
                task.advance(1)
                return replace(wheel, size=size)

            return tuple(pool.map(sized, wheels))

    def listed(self, wheels: Sequence[LockedWheel], lock: Lock) -> dict[LockedWheel, tuple[IndexFile, ...]]:
        """Return all files on each wheel's project page, none for a project without a page.

        Each page is read once. Raises LockError for a page that could not be read.
        """
        pages = self._pages(wheels, lock)
        unread = [page for page in dict.fromkeys(pages.values()) if page not in self._read]
        problem = f"{lock.target}: cannot read the page of a project"
        with self._web(problem) as web, ThreadPoolExecutor(8) as pool:
            files = pool.map(lambda page: project_files(web, page), unread)
            self._read |= dict(zip(unread, files, strict=True))
        return {wheel: files_before(wheel.name, self._read[page], lock) for wheel, page in pages.items()}

    def attests(self) -> bool:
        """Return whether the index has attestations, by the files of pip; True if it does not list pip."""
        files = self.project("pip", self.empty_lock("pip", "3.11", next(iter(MACHINES))))
        return not files or any(file.provenance is not None for file in files)

    def publishers(self, wheels: Sequence[LockedWheel], lock: Lock, progress: Progress) -> PublisherReport:
        """Return the publishers of wheels of `lock`, where their index attests them (PEP 740).

        After `behind` the pages of their projects are not read again. Raises LockError for an invalid
        attestation.
        """
        local = from_files(lock.origins)
        remote = [wheel for wheel in wheels if wheel.name not in local]
        try:
            listed = self.listed(remote, replace(lock, cutoff=None)) if remote else {}
        except LockError as error:
            return PublisherReport(known={}, attests=True, problem=error)
        attested = {
            wheel: file.provenance
            for wheel, files in listed.items()
            for file in files
            if file.provenance and file.filename == wheel.filename
        }
        if attested:
            return read_publishers(self._index, attested, progress)
        attests = any(file.provenance is not None for files in listed.values() for file in files)
        return PublisherReport(known={}, attests=attests or not remote)

    def uploads(self, packages: Sequence[LockedPackage], lock: Lock, target: Target) -> dict[str, datetime]:
        """Return the time of upload of each wheel by file name, where the index has it. Raises LockError."""
        wheels = tuple(package for package in packages if isinstance(package, LockedWheel))
        listed = self.listed(wheels, replace(lock, target=target.name, cutoff=None)) if wheels else {}
        times = {
            wheel: [file.upload_time for file in files if file.filename == wheel.filename]
            for wheel, files in listed.items()
        }
        return {wheel.filename: time for wheel, rows in times.items() for time in rows if time}

    def unavailable(self, lock: Lock) -> tuple[LockedWheel, ...]:
        """Return the wheels of `lock` that their index no longer has, by the pages of their projects.

        Each page is read once for all locks. A wheel without a page is searched as a build does. Wheels of
        the project's own files are skipped. Raises LockError if the index cannot be read.
        """
        local, from_index = from_files(lock.origins), from_indexes(lock.origins)
        wheels = [wheel for wheel in lock.wheels if wheel.name not in local]
        if not self._pages_at and any(wheel.name not in from_index for wheel in wheels):
            self.projects(("pip",), lock)
        pages = {
            wheel: f"{self._index.address(from_index[wheel.name], lock.target)}/{wheel.name}/"
            if wheel.name in from_index
            else self._pages_at and f"{self._pages_at}{wheel.name}/"
            for wheel in wheels
        }
        unread = [page for page in set(pages.values()) if page and page not in self._listed]

        def read(page: str) -> frozenset[str]:
            try:  # an index without hashes has names
                return frozenset(file.sha256 or file.filename for file in project_files(web, page))
            except HttpError as error:
                if error.status in (404, 410):
                    return frozenset()
                raise

        problem = f"{lock.target}: cannot read the page of a project"
        with self._web(problem) as web, ThreadPoolExecutor(8) as pool:
            self._listed |= dict(zip(unread, pool.map(read, unread), strict=True))
        gone = []
        for wheel in wheels:
            if {wheel.sha256, wheel.filename} & self._listed.get(pages[wheel], frozenset()):
                continue
            try:
                self.addresses(replace(lock, wheels=(wheel,), conda=()))
            except LockError as error:
                if not isinstance(error, UnsolvableError) and error.code not in _GONE:
                    raise
                gone.append(wheel)
        return tuple(gone)

    def required(
        self, wheels: Sequence[LockedWheel], listed: Mapping[LockedWheel, Sequence[IndexFile]], lock: Lock
    ) -> dict[str, tuple[str, ...]]:
        """Return Requires-Dist of each wheel whose METADATA can be read, by its name."""
        local = self._local_urls(lock)
        urls = {wheel.name: local[wheel.name] for wheel in wheels if wheel.name in local}
        for wheel in wheels:
            for file in listed.get(wheel, ()):
                if file.filename == wheel.filename:
                    urls[wheel.name] = file.url

        def read(url: str) -> tuple[str, ...] | None:
            try:
                return tuple(parse_email(read_metadata(web, url))[0].get("requires_dist", []))
            except (HttpError, OSError, zipfile.BadZipFile, KeyError, UnicodeDecodeError):
                return None

        with HttpSession(self._index) as web, ThreadPoolExecutor(8) as pool:
            pairs = zip(urls, pool.map(read, urls.values()), strict=True)
            return {name: needs for name, needs in pairs if needs is not None}

    def _pages(self, wheels: Sequence[LockedWheel], lock: Lock) -> dict[LockedWheel, str]:
        """Return each wheel's project page. uv writes the index of each pin in a comment."""
        from_index, local = from_indexes(lock.origins), from_files(lock.origins)
        keys = {wheel: (wheel, from_index.get(wheel.name, "")) for wheel in wheels}
        known = {wheel: self._page_of[key] for wheel, key in keys.items() if key in self._page_of}
        wheels = [wheel for wheel in wheels if wheel not in known]
        indexes = {
            wheel.name: self._index.address(from_index[wheel.name], f"{lock.target}: {wheel.name}")
            for wheel in wheels
            if wheel.name in from_index
        }
        if pins := [
            f"{wheel.name}=={wheel.version}" for wheel in wheels if wheel.name not in from_index | local
        ]:
            options = ("--no-deps", "--no-annotate", "--emit-index-annotation")
            with _scratch() as directory:
                text, _ = self._compile(directory, pins, replace(lock, origins=(), cutoff=None), *options)
            pattern = r"^([A-Za-z0-9._-]+)==\S+.*\n\s*# from (\S+)"
            matches: list[tuple[str, str]] = re.findall(pattern, text, re.MULTILINE)
            indexes |= {canonicalize_name(name): url.rstrip("/") for name, url in matches}
        pages = {wheel: f"{indexes[wheel.name]}/{wheel.name}/" for wheel in wheels if wheel.name in indexes}
        self._page_of |= {keys[wheel]: page for wheel, page in pages.items()}
        return known | pages


@contextmanager
def _scratch() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="imagefactory-lock-") as directory:
        yield Path(directory)


# --- Wheels in the project itself: their values to lock

_MOST_METADATA = 1 << 24  # bytes of METADATA


def local_wheels(lock: Lock, root: Path) -> tuple[LockedWheel, ...]:
    """Return the wheels of `lock.origins` below `root`, as they are now.

    Raises LockError for a wheel that is missing, invalid, differs from its name, or does not fit the lock's
    Python and platform.
    """
    return tuple(_read_wheel(lock, root, path) for path in from_files(lock.origins).values())


def _read_wheel(lock: Lock, root: Path, path: str) -> LockedWheel:
    file = root / path
    hint = f"copy the wheel to {file}, or change its path in the recipe of {lock.target}"
    if not file.is_file():
        raise LockError("local-wheel-missing", f"{lock.target}: the wheel {path} is not in {root}", hint=hint)
    if not file.resolve().is_relative_to(root.resolve()):
        raise LockError(
            "local-wheel-outside",
            f"{lock.target}: {path} is a link to outside {root}",
            hint="replace the link by the wheel",
        )
    name, version, *_ = parse_wheel_filename(file.name)
    try:
        wheel = LockedWheel(
            name=name, version=str(version), filename=file.name, sha256=digest(file), size=file.stat().st_size
        )
        metadata = wheel_metadata(file)
    except OSError as error:
        raise LockError(*os_problem("read", f"{path} of {lock.target}", error), hint=hint) from error
    if metadata != (name, version):
        problem = (
            f"found {metadata[0]} {metadata[1]}"
            if metadata
            else "it is corrupt, or was not built by a build tool"
        )
        raise LockError(
            "local-wheel-invalid",
            f"{lock.target}: {path} is not a wheel of {name} {version}: {problem}",
            hint="build the wheel again (pip wheel --no-deps, python -m build) and do not rename it",
        )
    if fault := misfit(wheel, lock.python, lock.platform):
        raise LockError(
            "local-wheel-incompatible",
            f"{lock.target}: {fault}",
            hint="build the wheel for this Python and platform, for example in an image on the same base",
        )
    return wheel


def wheel_metadata(file: Path) -> tuple[str, Version] | None:
    """Return the name and version in a wheel's own metadata, None for none."""
    try:
        with zipfile.ZipFile(file) as archive:
            for entry in archive.infolist():
                if entry.filename.count("/") == 1 and entry.filename.endswith(".dist-info/METADATA"):
                    with archive.open(entry) as file_handle:
                        raw, _ = parse_email(file_handle.read(_MOST_METADATA))
                    return canonicalize_name(raw["name"]), Version(raw["version"])
    except (zipfile.BadZipFile, NotImplementedError, KeyError, InvalidVersion):
        pass
    return None
