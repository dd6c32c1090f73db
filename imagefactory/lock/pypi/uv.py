"""uv as the solver of wheels.

A lock names one wheel with one hash for each package: the very file that will be in the image.
"""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import copy
from dataclasses import replace
from pathlib import Path
from threading import Lock as ThreadLock

from packaging.metadata import parse_email
from packaging.utils import canonicalize_name

from imagefactory.errors import LockError, ToolError, UnsolvableError, extra_hint, own_pip_command
from imagefactory.gpu.capability import MACHINES
from imagefactory.http import HttpSession, RejectedError, TransientError, redact
from imagefactory.lock import LockRequest, OutdatedPackage
from imagefactory.lock.pypi.explain import explain_conflict, explain_failure, explain_on, unreachable_error
from imagefactory.lock.pypi.facts import check_facts, check_single_cuda
from imagefactory.lock.pypi.index import IndexFile, PackageIndex, project_files
from imagefactory.lock.pypi.local import local_wheels
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
from imagefactory.lock.pypi.requirements import from_files, from_indexes
from imagefactory.lock.pypi.unbuilt import (
    companion_needs,
    require_wheels,
    solve_companions,
    with_needs,
    without,
)
from imagefactory.model import Lock, LockedWheel, Target
from imagefactory.progress import Progress
from imagefactory.recipes.values import package_of

# --- The file in which uv is asked for packages: plain lines, or a project where some come from elsewhere
# Only a project tells uv that a package comes from one index and from no other; the index is asked for
# nothing else then. Wheels that lie in the factory are shown to uv as such an index, so that no path of this
# machine gets into what it says.


_PROJECT = "imagefactory-asked"
_LOCAL = "factory.wheels"  # unlike any name of the settings


def write_requirements(folder: Path, requirements: Iterable[str], lock: Lock, index: PackageIndex) -> Path:
    """Write the file in `folder` that requires `wanted` (PEP 508), those of `lock.origins` from there.

    Their order is kept: of two packages that compete, uv gives the newest release to the first one.
    Raises UsageError for an index whose address this machine does not know, LockError for a wheel as
    `local_wheels` does.
    """
    lines = list(dict.fromkeys(requirements))
    names = set(map(package_of, lines))
    origins = [pair for pair in lock.origins if pair[0] in names]
    if not origins:
        path = folder / "asked.txt"
        path.write_text(requirement_lines(lines))
        return path
    path = folder / "pyproject.toml"
    named, files = from_indexes(tuple(origins)), from_files(tuple(origins))
    addresses = {name: index.address(name, f"{lock.target}: {package}") for package, name in named.items()}
    flat = folder / "wheels"
    for wheel in local_wheels(replace(lock, origins=tuple(files.items())), index.root):
        flat.mkdir(exist_ok=True)
        (flat / wheel.filename).symlink_to(index.root.absolute() / files[wheel.name])
    text = [
        f'[project]\nname = "{_PROJECT}"\nversion = "0"\ndependencies = {json.dumps(lines)}',
        # Else uv would look for one in the folders above, where anyone could have put it.
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
    path.write_text(requirement_lines(text))
    return path


def read_via(solution: str) -> dict[str, tuple[str, ...]]:
    """Return the packages that require each one, by uv's comments in a file that it compiled."""
    requirers: dict[str, tuple[str, ...]] = {}
    name = ""
    for line in solution.splitlines():
        if "==" in line and not line.startswith(" "):
            name = package_of(line)
        elif by := re.fullmatch(r" +# +(?:via +)?([A-Za-z0-9][A-Za-z0-9._-]*)", line):
            requirers[name] = (*requirers.get(name, ()), package_of(by[1]))
    return {
        name: tuple(other for other in by if other not in ("via", _PROJECT)) for name, by in requirers.items()
    }


def requirement_lines(entries: Iterable[str]) -> str:
    """A line each."""
    return "".join(f"{entry}\n" for entry in entries)


def plain_uv_message(message: str) -> str:
    """What uv says of the project as it says it of plain lines."""
    return message.replace(f"{_PROJECT} depends on", "you require")


# What a machine's uv settings may not decide. Its index, certificates and caches it may.
_SOLVE = (
    "--only-binary=:all:",
    "--resolution=highest",
    "--prerelease=if-necessary-or-explicit",
    "--index-strategy=first-index",
    "--no-header",
    "--annotation-style=split",
)


# sysconfig, by which uv's package finds its program, is not ready for two threads that ask it first.
_FINDING = ThreadLock()


class UvLocker:
    """Solves with uv, the program that comes with its PyPI package.

    `python` is the interpreter that uv asks about this machine; the target's own is only simulated.
    """

    def __init__(self, index: PackageIndex, *, python: Path) -> None:
        self._index = index
        self._python = python
        self._platforms: list[tuple[str, str]] = []
        self._version, self._pages_at = "", ""
        self._solved: dict[WheelRequest, PinnedVersions | NoWheelError] = {}

    def require(self) -> str:
        """uv's version. Raises ToolError without uv."""
        self._version = self._version or self._ask_version()
        return self._version

    def _ask_version(self) -> str:
        result = self._run(["--version"])
        match = re.search(r"\d+\.\d+\.\d+\S*", result.stdout)
        if result.returncode != 0 or not match:
            raise ToolError(
                "uv-not-working",
                f"cannot start uv: {(result.stderr or result.stdout).strip()[:200]}",
                hint=own_pip_command("install", "--force-reinstall uv"),
            )
        return match[0]

    def lock(self, request: LockRequest, progress: Progress) -> Lock:
        """Solve the lock of a target.

        Previous pins are preferences: only what must move moves. Every wheel of the parent stays. Raises
        UnsolvableError if there is no solution, LockError if it is not what the target names, ToolError
        without uv.
        """
        target, under, question = request.target, request.under, self._question(request)
        try:
            with without(request.absent, question) as reduced:
                complete, pins = require_wheels(self, reduced, target, progress)
            lock = replace(complete.lock, wheels=self.wheels(complete, pins, progress))
        except (UnsolvableError, NoWheelError) as error:
            reason = self.explained(error, question, target)
            if under and isinstance(reason, UnsolvableError):
                reason = explain_on(reason, under, target)
            raise reason from error
        check_facts(lock, target)
        return lock

    def reason(self, request: LockRequest, error: LockError) -> LockError:
        """The error of a request with what contradicts, and a hint that the solver has tried."""
        return self.explained(error, self._question(request), request.target)

    def explained(self, error: LockError, question: WheelRequest, target: Target) -> LockError:
        """The error of a question with what contradicts, and a hint that the solver has tried."""
        if isinstance(error, NoWheelError):
            if (pin := without_wheel(error.account)) and (
                files := self.project(pin.partition("==")[0], question.lock)
            ):
                works = working_versions(pin, files, question.lock)
                error.hint = f"images contain only wheels, and {works}"
            return error
        if isinstance(error, UnsolvableError) and not error.conflict:
            return explain_conflict(self, question, error, (canonicalize_name(target.framework),))
        return error

    def versions(self, request: LockRequest, progress: Progress, *, declared: bool = False) -> PinnedVersions:
        """The versions that a lock would have, without a look at their files. Raises like `lock`.

        With `declared` by what packages declare: of known needs only companions count, sources are not looked
        at, and NoWheelError is raised for packages without a wheel.
        """
        try:
            question = self._question(request)
            if declared:
                return solve_companions(self, question)[1]
            return require_wheels(self, question, request.target, progress)[1]
        except UnsolvableError as error:
            raise explain_on(error, request.under, request.target) if request.under else error from error

    def _question(self, request: LockRequest) -> WheelRequest:
        target, under = request.target, request.under
        empty = Lock(
            target=target.name,
            content_hash=request.content_hash,
            python=target.python,
            platform=under.platform if under else self.platform(target, request.base.glibc),
            solver=f"uv {self.require()}",
            wheels=(),
            origins=origins_of(target, under),
        )
        return WheelRequest(
            lock=empty,
            requirements=target.requirements,
            constraints=target.constraints,
            previous=request.previous,
            update=check_update_names(request),
            update_all=request.update_all,
            fixed=under.wheels if under else (),
            sources=target.sources,
            exclude=check_exclude(request),
        )

    def behind(self, request: LockRequest, lock: Lock, progress: Progress) -> tuple[OutdatedPackage, ...]:
        """What of a solution is far behind the newest release of the index. Raises like `lock`."""
        question = with_needs(self._question(request), companion_needs(versions_of(lock.wheels), lock.python))
        return find_outdated(self, question, lock.wheels, request.target.framework, progress)

    def wheels(
        self, question: WheelRequest, pins: PinnedVersions, progress: Progress
    ) -> tuple[LockedWheel, ...]:
        """The very wheels of a solution, sorted by name.

        A file of `question.previous` stays while its version does and the index has it. Raises LockError for
        a package without a fitting wheel.
        """
        offers = self.offers(pins.lines, question.lock)
        reusable = reusable_wheels(question.previous, question.lock, question.update)
        chosen = choose(offers, question.lock, reusable, lambda name: self.project(name, question.lock))
        chosen = self._sizes(chosen, offers, progress)
        fixed = {wheel.name for wheel in question.fixed}
        local = [wheel for wheel in local_wheels(question.lock, self._index.root) if wheel.name not in fixed]
        wheels = tuple(sorted((*question.fixed, *chosen, *local), key=lambda wheel: wheel.name))
        check_single_cuda(question.lock.target, wheels, pins.via)
        return wheels

    def addresses(self, lock: Lock) -> dict[str, str]:
        """Where each locked wheel is now: file name -> URL (which may hold the index's credentials).

        A file is known by its hash: a better wheel uploaded later changes nothing, and a yanked version
        is still found. Raises LockError for a file that the index no longer has or has changed.
        """
        offers = self.offers([f"{wheel.name}=={wheel.version}" for wheel in lock.wheels], lock)
        urls, missing, local = {}, [], from_files(lock.origins)
        for wheel in lock.wheels:
            path = local.get(wheel.name)
            file = (self._index.root.absolute() / path).as_uri() if path else ""
            url = file or address_of(wheel, offers.get(wheel.name, ()), lock)
            if url:
                urls[wheel.filename] = url
            else:
                missing.append(wheel)
        return urls | self._search(missing, lock)

    def solve(self, question: WheelRequest) -> PinnedVersions:
        """uv's solution without what is fixed or given. Raises UnsolvableError, or ToolError without uv.

        A question is asked once, but for one with folders, whose files may change.
        """
        key = replace(question, sources=())
        if question.stubs or question.sdists:
            return self._solve(key)
        if key not in self._solved:
            try:
                self._solved[key] = self._solve(key)
            except NoWheelError as error:
                self._solved[key] = error
        known = self._solved[key]
        if isinstance(known, NoWheelError):
            raise copy(known)
        return known

    def _solve(self, question: WheelRequest) -> PinnedVersions:
        # A pin among the requirements also lets uv take a version that has been yanked since.
        fixed = tuple(f"{wheel.name}=={wheel.version}" for wheel in question.fixed)
        with tempfile.TemporaryDirectory(prefix="imagefactory-lock-") as folder:
            bounds, out = (Path(folder) / name for name in ("bounds.txt", "out.txt"))
            needs = (*question.requirements, *fixed)
            input_file = write_requirements(Path(folder), needs, question.lock, self._index)
            bounds.write_text(requirement_lines(dict.fromkeys((*question.constraints, *question.given))))
            if (
                question.previous and not question.update_all
            ):  # uv prefers the versions of the file it replaces
                out.write_text(
                    requirement_lines(
                        f"{package.name}=={package.version}" for package in question.previous.wheels
                    )
                )
            more = [f"--upgrade-package={name}" for name in question.update]
            more += [f"--find-links={package}" for package in (question.stubs, question.sdists) if package]
            if question.exclude:  # a requirement that applies nowhere, in place of those of others
                overrides = Path(folder) / "overrides.txt"
                overrides.write_text(
                    requirement_lines(f"{name}; sys_platform == 'never'" for name in question.exclude)
                )
                more.append(f"--overrides={overrides}")
            arguments = [f"--constraints={bounds}", f"--output-file={out}", *more]
            messages = self._compile(input_file, arguments, question.lock).stderr
            solution = out.read_text()
        pins = [line for line in solution.splitlines() if "==" in line and not line.startswith(" ")]
        elsewhere = {canonicalize_name(pin.partition("==")[0]) for pin in (*fixed, *question.given)}
        lacking = re.findall(
            r"The package `([^`=]+)==[^`]*` does not have an extra named `([^`]+)`", messages
        )
        return PinnedVersions(
            lines=tuple(pin for pin in pins if canonicalize_name(pin.partition("==")[0]) not in elsewhere),
            lacking=tuple(sorted({(canonicalize_name(name), extra) for name, extra in lacking})),
            via=read_via(solution),
        )

    def requirers(self, question: WheelRequest, wheels: Sequence[LockedWheel]) -> dict[str, tuple[str, ...]]:
        """By each package of a solution those that require it. Raises LockError."""
        pins = tuple(f"{wheel.name}=={wheel.version}" for wheel in wheels)
        return self.solve(replace(question, constraints=(*question.constraints, *pins))).via

    def metadata(self, pin: str, lock: Lock) -> str:
        """METADATA of the wheel that fits a pin (`name==version`), beside it (PEP 658) or inside.

        Raises LockError where the index has no such wheel, or does not give this of it.
        """
        offered = self.offers([pin], lock)
        best = best_offer((offer for files in offered.values() for offer in files), lock)
        if best is None:
            raise LockError(
                "wheel-not-found",
                f"{lock.target}: the index has no wheel of {pin} for this Python and platform",
            )
        web = HttpSession(self._index)
        try:
            return read_metadata(web, best[1].url)
        except (RejectedError, TransientError, OSError, zipfile.BadZipFile, KeyError) as error:
            raise LockError(
                "index-read-failed",
                f"{lock.target}: cannot read the metadata of {pin}: {redact(str(error))}",
                hint="try again",
            ) from error
        finally:
            web.close()

    def reach(self) -> None:
        """Asks the index for one project, as a solve would. Raises LockError when it does not answer."""
        with tempfile.TemporaryDirectory(prefix="imagefactory-lock-") as folder:
            input_file = Path(folder) / "asked.txt"
            input_file.write_text("pip\n")
            options = ["--no-deps", "--no-cache", "--quiet", f"--python={self._python}"]
            result = self._run(["pip", "compile", str(input_file), *options])
        # An index without that project has answered too.
        if result.returncode and "not found in the" not in result.stderr:
            raise unreachable_error(result.stderr, self._index)

    def offers(self, pins: Iterable[str], lock: Lock) -> dict[str, tuple[IndexWheel, ...]]:
        """For each pin (`name==version`) the fitting files that its index offers, by normalised name."""
        local = from_files(lock.origins)
        remote = tuple(pin for pin in pins if package_of(pin) not in local)
        if not remote:
            return {}
        with tempfile.TemporaryDirectory(prefix="imagefactory-lock-") as folder:
            input_file, out = (
                write_requirements(Path(folder), remote, lock, self._index),
                Path(folder) / "pylock.toml",
            )
            self._compile(input_file, ["--no-deps", "--format=pylock.toml", f"--output-file={out}"], lock)
            return parse_pylock(out.read_text(), out, lock.target)

    def _compile(
        self, input_file: Path, arguments: list[str], lock: Lock
    ) -> subprocess.CompletedProcess[str]:
        machine = next(machine for machine in MACHINES.values() if lock.platform.endswith(f"_{machine}"))
        glibc = lock.platform.removesuffix(f"_{machine}").removeprefix("manylinux_").replace("_", ".")
        result = self._run(
            [
                "pip",
                "compile",
                str(input_file),
                *arguments,
                *_SOLVE,
                *(("--no-sources",) if input_file.suffix == ".txt" else ()),
                f"--python={self._python}",
                f"--python-version={lock.python}",
                f"--python-platform={machine}-manylinux_2_{self._minor(machine, glibc, lock.target)}",
            ]
        )
        if result.returncode != 0:
            message = plain_uv_message(result.stderr)
            raise explain_failure(lock, message, self._index)
        return result

    def source(self, file: IndexFile, folder: Path) -> Path:
        """A source distribution of the index, in the cache or in `folder`. Raises DownloadError."""
        return fetch_sdist(self._index, file, self._index.sdists or folder)

    @property
    def root(self) -> Path:
        """The folder of the recipes, which the paths of a question start from."""
        return self._index.root

    def project(self, name: str, lock: Lock) -> tuple[IndexFile, ...]:
        """The files of a project that uv has no wheel of; none where the index does not tell them.

        uv is not asked where it is: without a wheel it would run the project's own code to know more.
        """
        return self.projects((name,), lock)[name]

    def projects(self, names: Sequence[str], lock: Lock) -> dict[str, tuple[IndexFile, ...]]:
        """The same of several projects, read at a time."""
        own, pip = (
            from_indexes(lock.origins),
            LockedWheel(name="pip", version="24.0", filename="", sha256="", size=0),
        )

        def page_of(known: LockedWheel) -> str:
            try:
                return self._page_of(known, lock)
            except (LockError, KeyError):
                return ""

        if not self._pages_at and any(name not in own for name in names):
            self._pages_at = page_of(pip).removesuffix("pip/")
        pages = {name: self._pages_at and f"{self._pages_at}{name}/" for name in names}
        pages |= {name: page_of(replace(pip, name=name)) for name in names if name in own}
        web = HttpSession(self._index)

        def read(page: str) -> tuple[IndexFile, ...]:
            try:
                return project_files(web, page) if page else ()
            except (RejectedError, TransientError):
                return ()

        try:
            with ThreadPoolExecutor(8) as pool:
                return dict(zip(pages, pool.map(read, pages.values()), strict=True))
        finally:
            web.close()

    def _page_of(self, known: LockedWheel, lock: Lock) -> str:
        """The page of a project, as uv finds it; an index without that project may have others."""
        try:
            return self._pages((known,), lock)[known]
        except LockError:
            if not self._index.url:
                raise
            return f"{self._index.url.rstrip('/')}/{known.name}/"

    def _run(self, arguments: list[str]) -> subprocess.CompletedProcess[str]:
        try:
            from uv import find_uv_bin

            with _FINDING:
                program = find_uv_bin()
        except (ImportError, FileNotFoundError) as error:
            raise ToolError("extra-not-installed", "uv is not installed", hint=extra_hint("build")) from error
        # From `/`: uv reads a uv.toml of the folder it stands in and of those above, and in a shared
        # temporary folder anyone could have put one.
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
        """The newest manylinux platform that uv knows and `glibc` (`2.36`) fulfils."""
        machine = MACHINES.get(target.platform)
        if machine is None:
            raise LockError(
                "lock-platform-unsupported",
                f"{target.name}: platform '{target.platform}' cannot be locked",
                hint=f"supported platforms: {', '.join(MACHINES)}",
            )
        return f"manylinux_2_{self._minor(machine, glibc, target.name)}_{machine}"

    def _minor(self, machine: str, glibc: str, target: str) -> int:
        """The newest C library `2.<minor>` that uv has a platform for and `glibc` fulfils."""
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

    def _sizes(
        self,
        wheels: tuple[LockedWheel, ...],
        offers: Mapping[str, tuple[IndexWheel, ...]],
        progress: Progress,
    ) -> tuple[LockedWheel, ...]:
        """The wheels with their sizes: what the index said of them, else asked from the server."""
        known = {o.sha256: o for offered in offers.values() for o in offered}
        web = HttpSession(self._index)
        try:
            with (
                progress.task("sizes", total=len(wheels), unit="packages") as task,
                ThreadPoolExecutor(8) as pool,
            ):

                def sized(wheel: LockedWheel) -> LockedWheel:
                    size = wheel.size or known[wheel.sha256].size or web.size(known[wheel.sha256].url)
                    task.advance(1)
                    return replace(wheel, size=size)

                return tuple(pool.map(sized, wheels))
        except (RejectedError, TransientError) as error:
            raise LockError(
                "index-read-failed",
                f"cannot read the size of a wheel: {redact(str(error))}",
                hint="try again",
            ) from error
        finally:
            web.close()

    def _search(self, missing: list[LockedWheel], lock: Lock) -> dict[str, str]:
        """Addresses of files that uv did not list, from the projects' own pages of the index."""
        urls, listed = {}, self.listed(missing, lock) if missing else {}
        for wheel in missing:
            offers = [
                IndexWheel(filename=file.filename, url=file.url, sha256=file.sha256, size=None)
                for file in listed.get(wheel, ())
            ]
            url = address_of(wheel, offers, lock)
            if not url:
                raise LockError(
                    "locked-file-gone",
                    f"{lock.target}: the index no longer has {wheel.filename} "
                    f"(sha256 {wheel.sha256[:12]}...)",
                    hint=f"imagefactory lock {lock.target} --update {wheel.name}",
                )
            urls[wheel.filename] = url
        return urls

    def listed(self, wheels: Sequence[LockedWheel], lock: Lock) -> dict[LockedWheel, tuple[IndexFile, ...]]:
        """All that each wheel's project page lists; none for a project that has none.

        Raises LockError for a page that could not be read.
        """
        web, pages = HttpSession(self._index), self._pages(wheels, lock)
        try:
            with ThreadPoolExecutor(8) as pool:
                files = pool.map(lambda page: project_files(web, page), pages.values())
                return dict(zip(pages, files, strict=True))
        except (RejectedError, TransientError) as error:
            raise LockError(
                "index-read-failed",
                f"{lock.target}: cannot read the page of a project: {redact(str(error))}",
                hint="try again",
            ) from error
        finally:
            web.close()

    def required(
        self, wheels: Sequence[LockedWheel], listed: Mapping[LockedWheel, Sequence[IndexFile]], lock: Lock
    ) -> dict[str, tuple[str, ...]]:
        """Requires-Dist of each wheel by its name, as far as its METADATA can be read."""
        local = from_files(lock.origins)
        urls = {
            wheel.name: (self._index.root.absolute() / local[wheel.name]).as_uri()
            for wheel in wheels
            if wheel.name in local
        }
        for wheel in wheels:
            for file in listed.get(wheel, ()):
                if file.filename == wheel.filename:
                    urls[wheel.name] = file.url
        web = HttpSession(self._index)

        def read(url: str) -> tuple[str, ...] | None:
            try:
                return tuple(parse_email(read_metadata(web, url))[0].get("requires_dist", []))
            except (RejectedError, TransientError, OSError, zipfile.BadZipFile, KeyError, UnicodeDecodeError):
                return None

        try:
            with ThreadPoolExecutor(8) as pool:
                pairs = zip(urls, pool.map(read, urls.values()), strict=True)
                return {name: needs for name, needs in pairs if needs is not None}
        finally:
            web.close()

    def _pages(self, wheels: Sequence[LockedWheel], lock: Lock) -> dict[LockedWheel, str]:
        """Each wheel's project page. uv knows which index each pin comes from, and tells in a comment."""
        own, local = from_indexes(lock.origins), from_files(lock.origins)
        indexes = {
            wheel.name: self._index.address(own[wheel.name], f"{lock.target}: {wheel.name}")
            for wheel in wheels
            if wheel.name in own
        }
        pins = [f"{wheel.name}=={wheel.version}" for wheel in wheels if wheel.name not in own | local]
        text, plain = "", replace(lock, origins=())
        if pins:
            with tempfile.TemporaryDirectory(prefix="imagefactory-lock-") as folder:
                input_file = write_requirements(Path(folder), pins, plain, self._index)
                text = self._compile(
                    input_file, ["--no-deps", "--no-annotate", "--emit-index-annotation"], plain
                ).stdout
        matches: list[tuple[str, str]] = re.findall(
            r"^([A-Za-z0-9._-]+)==\S+.*\n\s*# from (\S+)", text, re.MULTILINE
        )
        indexes |= {canonicalize_name(name): url.rstrip("/") for name, url in matches}
        return {wheel: f"{indexes[wheel.name]}/{wheel.name}/" for wheel in wheels if wheel.name in indexes}
