"""Build a wheel of a package in the image of its target, without network access.

source, tools -> the image's Python compiles -> a wheel, and a record of all its inputs
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename
from packaging.version import InvalidVersion, Version

from imagefactory import __version__
from imagefactory.access import Access, package_index, uv_locker
from imagefactory.actions.images import make_runner, stored_image
from imagefactory.actions.lock import LockOptions, release_cutoff
from imagefactory.actions.locked import require_lock
from imagefactory.build.wheel_layer import check_wheel, unpack_wheel
from imagefactory.errors import BuildError, DownloadError, LimitError, ToolError, UsageError, os_problem
from imagefactory.extras.wheels.wheel_builder import ISOLATED
from imagefactory.fs import explain_full_disk, locked_temporary_directory, replace_text, replacing
from imagefactory.gpu.knowledge.packages import source_build
from imagefactory.gpu.values import rocm_of
from imagefactory.lock.download import PackageCache
from imagefactory.lock.git import NoGitVersionError, git_version
from imagefactory.lock.pypi.offers import choose_sdist, fetch_sdist
from imagefactory.lock.pypi.question import WheelRequest
from imagefactory.lock.pypi.requirements import misfit
from imagefactory.lock.pypi.sources import MOST_REQUIRES, SourceProject, copy_source, read_project
from imagefactory.lock.pypi.unbuilt import has_nvcc
from imagefactory.lock.pypi.uv import wheel_metadata
from imagefactory.model import CommandResult, Lock, LockedWheel, Mount, ReleaseCutoff, RunSpec, Target
from imagefactory.oci.manifests import Image
from imagefactory.progress import Progress
from imagefactory.project import Project
from imagefactory.runtime.limits import decide_limits, read_capacity
from imagefactory.runtime.protocol import Runner
from imagefactory.serialize import parse_json
from imagefactory.trees import list_names, open_file, printable, read_chunks, read_file, remove_tree

BUILDER = Path(__file__).with_name("wheel_builder.py")
OF_PROJECTS = ("recipes", "lockfiles", "definitions", "wheels", "imagefactory.toml")
"""Names in the root of a project that imagefactory uses and that do not belong to a package there."""
BUILD_DIRECTORIES = ("/build/out", "/build/tools", "/build/cuda")
LEGACY = ("setuptools<81",)
"""The last setuptools with pkg_resources, according to its warning."""
OWN_TOOLS = ("pip", "setuptools", "wheel", "ninja", "packaging")
NVCC = ("nvidia-cuda-nvcc", "nvidia-cuda-crt", "nvidia-nvvm")
"""NVIDIA wheels that contain the complete compiler from CUDA 13 on.

Earlier ones contain only its last step.
"""
_GIT = re.compile(
    r"git\+(?P<url>(https|ssh|file)://[^@#\s]+)@(?P<commit>[0-9a-f]{40})"
    r"(#subdirectory=(?P<folder>[A-Za-z0-9_+-][A-Za-z0-9._+/-]*))?"
)
FIRST_TIME = "315532800"
"""The earliest file time in a wheel, in 1980."""
TIMEOUT = 86400
"""The time limit of a build in seconds. The largest packages take half of it on a few cores."""
UNBOUNDED = 1 << 62
MAX_JOBS = str((1 << 31) - 1)
"""The depth with which git fetches all commits, including those that an earlier fetch skipped."""
MOST_NAMES, LONGEST_RECORD = 10_000, 1 << 20
POLL_SECONDS = 0.2
"""Seconds between checks of the disk while git writes to it."""
_MISSING = re.compile(r"ModuleNotFoundError: No module named '([A-Za-z0-9_.]+)'")
_BACKEND_HINT = "check the build backend in pyproject.toml: it must follow PEP 517"
_TAIL, _LAST = 30, 10
_ERROR = re.compile(r":\d+: (fatal )?error: |\(\d+\): (catastrophic )?error|nvcc fatal|ld: (?!warning)")
"""Patterns of errors of gcc, nvcc and ld."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileRequest:
    """What to compile for which target. The wheel is written to `folder`.

    `source` is a requirement, a directory, an archive or `git+URL@COMMIT`. `capabilities` (`8.0`) default to
    those of the target. `limits` are the limits of a run, `timeout` is in seconds, None for no limit.
    `beside` are earlier wheels that the build requires. `label` is the name in messages. `reserved` are names
    of wheels in `folder` that other targets use, and that must not change.
    """

    source: str
    target: Target
    folder: Path
    capabilities: tuple[str, ...] = ()
    limits: tuple[tuple[str, int | None], ...] = ()
    timeout: float | None = TIMEOUT
    beside: tuple[Path, ...] = ()
    label: str = ""
    reserved: frozenset[str] = frozenset()

    @property
    def folders(self) -> tuple[Path, Path]:
        """The directories for its wheel. The second is for a wheel whose name is in `reserved`."""
        return self.folder, self.folder / self.target.name

    @property
    def title(self) -> str:
        """The name of the source in messages."""
        return self.label or self.source


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileResult:
    """The result: a wheel. `compiled` is false if it existed, built from the same source, image and tools."""

    wheel: Path
    compiled: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class _WheelSource:
    """A source. `path` is a copied archive or directory; `identity` identifies it and its content.

    `name` and `version` are those that its wheel must have, empty if unknown. `tagged` is the version from
    git, if the build would query git; `untagged` is why there is none.
    """

    path: Path
    identity: str
    name: str = ""
    version: str = ""
    tagged: str = ""
    untagged: str = ""


def compile_wheel(factory: Project, request: CompileRequest, progress: Progress) -> CompileResult:
    """Compile a package for a target.

    Raises UsageError for an invalid source, BuildError for a target that is not built or a package that does
    not compile, and the errors of locking and fetching.
    """
    target = request.target
    check_not_amd(target)
    lock, image = require_lock(factory, target), stored_image(factory, target)
    if image is None:
        raise BuildError(
            "image-not-built",
            f"{target.name} is not built",
            hint=f"run imagefactory build {target.name}",
        )
    return compile_in(factory, request, BuildImage(lock=lock, image=image), progress)


def check_not_amd(target: Target) -> None:
    """Raise UsageError if there is no compiler for the target's GPUs."""
    if rocm_of(target.cuda):
        raise UsageError(
            "amd-not-supported",
            f"{target.name} is for AMD GPUs: imagefactory has no compiler for them",
            hint="compile it on a machine with ROCm, and write ./wheels/NAME.whl in the recipe",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildImage:
    """The image in which a package is built, and its lock."""

    lock: Lock
    image: Image


def compile_in(
    factory: Project, request: CompileRequest, within: BuildImage, progress: Progress
) -> CompileResult:
    """Compile a package in an image of the store. Raises like `compile_wheel`.

    The packages of the image are hidden if the build neither requires nor imports any of them. If the build
    then lacks a module, it is repeated with visible packages.
    """
    runner = make_runner(factory, "unshare", request.target.name, progress)
    runner.require()
    layout = factory.layout
    bounds = decide_limits(dict(request.limits), read_capacity(layout.scratch))
    most = UNBOUNDED if bounds.scratch is None else bounds.scratch
    with layout.in_use(progress), locked_temporary_directory("compile-", layout.scratch) as scratch:
        source = _take_source(factory, request.source, within.lock, scratch / "source", most)
        project = read_project(source.path)
        source = replace(source, name=source.name or project.name, version=source.version or project.version)
        if source.tagged:
            progress.note(f"{request.title}: git has its version: {source.tagged}")
        job = _WheelBuild(
            factory=factory,
            request=request,
            within=within,
            source=source,
            project=project,
            most=most,
            scratch=scratch,
            runner=runner,
        )
        if needs_packages(project, within.lock):
            return _build(job, progress, isolated=False)
        try:
            return _build(job, progress, isolated=True)
        except _MissingModuleError as error:
            progress.note(
                f"{request.title}: {error.message}, so it is built with the packages of {request.target.name}"
            )
            return _build(job, progress, isolated=False)


class _MissingModuleError(BuildError):
    """The build did not find a module."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _WheelBuild:
    """The build of one wheel. `most` is the limit of its disk space in bytes."""

    factory: Project
    request: CompileRequest
    within: BuildImage
    source: _WheelSource
    project: SourceProject
    most: int
    scratch: Path
    runner: Runner


def needs_packages(project: SourceProject, lock: Lock) -> bool:
    """Return whether the build requires or imports a package of the target, as extensions of torch do."""
    there = {package.name: package.version for package in lock.packages if package.name not in OWN_TOOLS}
    named = any(_satisfied(Requirement(text), there) for text in project.requires)
    return named or any(canonicalize_name(module) in there for module in project.imports)


def _satisfied(requirement: Requirement, there: Mapping[str, str]) -> bool:
    version = there.get(canonicalize_name(requirement.name))
    try:
        return version is not None and requirement.specifier.contains(version, prereleases=True)
    except InvalidVersion:  # conda versions need not be valid for PyPI
        return True


def _build(job: _WheelBuild, progress: Progress, *, isolated: bool) -> CompileResult:
    request, source, lock = job.request, job.source, job.within.lock
    record = _record(request, source, job.within.image, isolated=isolated)
    fixed = (*job.project.requires, *(LEGACY if "pkg_resources" in job.project.imports else ()))
    requires = next(
        (w for directory in request.folders if (w := _recorded_requires(directory, record)) is not None), None
    )
    steps = _BuildSteps(job, lock=lock, isolated=isolated)
    tools = _tools(job.factory, request, lock, (*fixed, *(requires or ())), progress, isolated=isolated)
    if requires is None:
        steps.lay(tools)
        requires = steps.ask(progress)
        if requires:
            tools = _tools(job.factory, request, lock, (*fixed, *requires), progress, isolated=isolated)
    record |= {"requires": list(requires), "tools": [f"{w.filename} sha256:{w.sha256}" for w in tools]}
    if there := next(
        (path for directory in request.folders if (path := _find_built_wheel(directory, record))), None
    ):
        return CompileResult(wheel=there, compiled=False)
    steps.lay(tools)
    steps.run("wheel", f"{request.title}: compile in {request.target.name}", progress)
    built = _take_wheel(request, source, lock, job.scratch, job.most)
    directory = request.folders[_is_wheel_name_used(request, built)]
    wheel = directory / built.filename
    with explain_full_disk(request.folder):
        directory.mkdir(parents=True, exist_ok=True)
        with replacing(wheel) as out, open_file(job.scratch / "wheel", built.filename, built.size) as fd:
            out.writelines(read_chunks(fd, built.filename, built.size))
        text = json.dumps({**record, "sha256": built.sha256}, indent=2) + "\n"
        replace_text(_record_path(wheel), text)
    return CompileResult(wheel=wheel, compiled=True)


def _is_wheel_name_used(request: CompileRequest, wheel: LockedWheel) -> bool:
    """Return whether another target uses another wheel with this name.

    Raises BuildError if a link leaves `folder`.
    """
    try:
        used = wheel.filename in request.reserved and _sha256(request.folder, wheel.filename) != wheel.sha256
    except OSError:
        used = False
    if used and not request.folders[1].resolve().is_relative_to(request.folder.resolve()):
        raise BuildError(
            "wheel-folder-outside",
            f"{request.folders[1]} is a link that leaves {request.folder}",
            hint="replace the link with a directory",
        )
    return used


@dataclass(slots=True)
class _BuildSteps:
    """The steps of a build in the image, with the last unpacked tools."""

    job: _WheelBuild
    lock: Lock
    isolated: bool
    prepared: bool = False
    laid: Mapping[LockedWheel, Path] | None = None

    def lay(self, tools: Mapping[LockedWheel, Path]) -> None:
        if tools == self.laid:
            return
        directory = self.job.scratch / "tools"
        if directory.exists():
            remove_tree(directory)
        _unpack_tools(tools, directory, self.job.most)
        self.laid = tools

    def ask(self, progress: Progress) -> tuple[str, ...]:
        """Return the requirements of the build backend. Raises BuildError if they are invalid."""
        request = self.job.request
        self.run("requires", f"{request.title}: what it is built with", progress)
        try:
            listed = parse_json(read_file(self.job.scratch / "out", "requires.json", LONGEST_RECORD))
            return check_requires(listed)
        except (OSError, ValueError, TypeError) as error:
            raise BuildError(
                "build-requires-invalid",
                f"{request.title}: cannot read its build requirements: {printable(str(error))}",
                hint=_BACKEND_HINT,
            ) from error

    def run(self, step: str, title: str, progress: Progress) -> None:
        job, out = self.job, self.job.scratch / "out"
        if out.exists():
            remove_tree(out)
        out.mkdir()
        if not self.prepared:
            job.runner.prepare(job.within.image, checked=False)
            self.prepared = True
        spec = _spec(job, f"{step}{ISOLATED}" if self.isolated else step)
        with progress.stage(title):
            result = job.runner.run(job.within.image, spec)
        missing = (
            _MISSING.search(result.stdout + result.stderr) if result.returncode and self.isolated else None
        )
        if missing:
            raise _MissingModuleError(
                "build-module-missing", f"the build imports {missing[1]}, which it does not require"
            )
        _check_compilers(job.request, result, job.source.untagged)


def check_requires(listed: object) -> tuple[str, ...]:
    """Return the requirements that an untrusted build wrote. Raises ValueError or TypeError if invalid."""
    if not isinstance(listed, list) or len(listed) > MOST_REQUIRES:
        raise ValueError(f"expected a list of at most {MOST_REQUIRES} packages")
    requirements = [Requirement(item) for item in listed]
    if elsewhere := next((item for item in requirements if item.url), None):
        raise ValueError(f"{elsewhere.name} has an address, but only packages of the index are supported")
    return tuple(sorted(map(str, requirements)))


def _take_wheel(
    request: CompileRequest, source: _WheelSource, lock: Lock, scratch: Path, most: int
) -> LockedWheel:
    """Copy the wheel of a build to a directory that no build can write to.

    Raises BuildError unless there is exactly one valid wheel, for the expected package, Python and platform.
    """
    out, destination = scratch / "out", scratch / "wheel"
    destination.mkdir()
    whole, size = hashlib.sha256(), 0
    try:
        names = [name for name in list_names(out, MOST_NAMES) if name.endswith(".whl")]
        if len(names) != 1:
            raise BuildError(
                "wheel-not-written",
                f"{request.title}: expected one wheel, but the build wrote {len(names)}",
                hint=_BACKEND_HINT,
            )
        name = printable(names[0])
        with open_file(out, names[0], most) as fd, (destination / name).open("xb") as file:
            for data in read_chunks(fd, name, most):
                whole.update(data)
                file.write(data)
                size += len(data)
    except OSError as error:
        raise BuildError(
            *os_problem("copy", f"{error.filename} of {request.title}", error),
            hint="raise the limit: --limit scratch=...",
        ) from error
    try:
        project, version, *_ = parse_wheel_filename(name)
    except (InvalidWheelFilename, InvalidVersion) as error:
        raise BuildError(
            "wheel-invalid",
            f"{request.title}: the build wrote an invalid wheel: {error}",
            hint=_BACKEND_HINT,
        ) from error
    # A local label (`+cu130`) may say what it was built for. The release must be that of its source.
    if project != (source.name or project) or (
        source.version and Version(version.public) != Version(Version(source.version).public)
    ):
        expected = f"{source.name} {source.version}".rstrip()
        raise BuildError(
            "wheel-mismatch",
            f"{request.title}: expected a wheel of {expected}, but the build wrote {name}",
            hint=_BACKEND_HINT,
        )
    wheel = LockedWheel(
        name=project, version=str(version), filename=name, sha256=whole.hexdigest(), size=size
    )
    if fault := misfit(wheel, lock.python, lock.platform):
        raise BuildError("wheel-incompatible", f"{request.title}: {fault}", hint=_BACKEND_HINT)
    check_wheel(destination / name, wheel.sha256)
    if (metadata := wheel_metadata(destination / name)) != (project, version):
        actual = f"{metadata[0]} {metadata[1]}" if metadata else "no name"
        raise BuildError(
            "wheel-mismatch",
            f"{request.title}: expected {project} {version} in the metadata of {name}, found {actual}",
            hint=_BACKEND_HINT,
        )
    return wheel


def _spec(job: _WheelBuild, step: str) -> RunSpec:
    request, source, scratch = job.request, job.source, job.scratch
    mounts = (
        Mount(source=scratch / "source", target="/build/source", writable=True, scratch=True),
        Mount(source=scratch / "tools", target="/build/tools", bind=True),
        Mount(source=scratch / "out", target="/build/out", writable=True, scratch=True),
    )
    inside = "/build/source" if source.path.is_dir() else f"/build/source/{source.path.name}"
    capabilities = request.capabilities or request.target.capabilities
    variables = {
        "SOURCE_DATE_EPOCH": FIRST_TIME,
        "PYTHONHASHSEED": "0",
        "MAX_JOBS": str(job.factory.settings.worker_count),
        "TORCH_CUDA_ARCH_LIST": ";".join(capabilities),
        "FORCE_CUDA": "1" if has_nvcc(request.target) else "0",
    }
    if known := source_build(source.name):
        variables |= known.variables(capabilities)
    if source.tagged:
        variables[job.project.version_variable] = source.tagged
    return RunSpec(
        argv=("python", f"/build/tools/{BUILDER.name}", step, inside, *BUILD_DIRECTORIES),
        environment=tuple(variables.items()),
        mounts=mounts,
        limits=request.limits,
        timeout=request.timeout,
    )


def what_failed(output: str) -> str:
    """Return the excerpt of a build log: the first compiler error and the end."""
    lines = output.splitlines()
    first = next((number for number, line in enumerate(lines) if _ERROR.search(line)), len(lines))
    end = max(len(lines) - _TAIL, 0)
    if first >= end:
        return "\n".join(lines[end:])
    return "\n".join([*lines[first : first + _TAIL], "[...]", *lines[-_LAST:]])


def _check_compilers(request: CompileRequest, result: CommandResult, untagged: str = "") -> None:
    """Check the result of a build. Raises BuildError with the first compiler error and the end of the log.

    `untagged` is why git has no version of the source, if the build queries git.
    """
    message, hint = result.over
    if result.timed_out:
        message = f"the build was stopped at its limit time={request.timeout:.0f}"
        hint = "raise it with `--limit time=...`, or set time=none"
    if message:
        raise LimitError("limit-reached", f"{request.title}: {message}", hint=hint)
    if result.returncode == 0:
        return
    output = what_failed(result.stdout + result.stderr)
    hint = "add the packages and Debian libraries (system: in a recipe) that it needs to the target"
    if not has_nvcc(request.target):
        hint = f"if it needs nvcc: PyPI has it from CUDA 13 on, and this target is for {request.target.cuda}"
    if untagged:
        hint = (
            f"its version comes from git, but {untagged}: tag a commit of it (git tag v1.0), or "
            'set version = "1.0" under [project] in its pyproject.toml and remove version from dynamic'
        )
    raise BuildError(
        "compile-failed", f"{request.title} does not compile in {request.target.name}:\n{output}", hint=hint
    )


def _take_source(access: Access, text: str, lock: Lock, directory: Path, most: int) -> _WheelSource:
    if match := _GIT.fullmatch(text):
        clone = directory.with_name("clone")
        room = min(most, shutil.disk_usage(clone.parent).free // 2)
        _clone(match["url"], match["commit"], clone, room)
        inside = clone / (match["folder"] or ".")
        if not inside.is_dir() or not inside.resolve().is_relative_to(clone.resolve()):
            raise UsageError(
                "source-folder-missing",
                f"{text} has no directory {match['folder']}",
                hint="correct the part #subdirectory=... of the address",
            )
        copy_source(inside, directory, most)
        if read_project(directory).version_variable:  # the version counts all commits, so fetch them
            fetch = ("fetch", "--quiet", "--tags", "--depth", MAX_JOBS, match["url"], match["commit"])
            _run_git(clone, (fetch,), f"the history of {text}", room)
        source = _with_git_version(_WheelSource(path=directory, identity=text), inside)
        remove_tree(clone)
        return source
    if text.startswith(("git+", "http")):
        raise UsageError(
            "commit-missing",
            f"{text} has no commit",
            hint="use git+https://HOST/REPOSITORY@COMMIT, with all 40 digits of the commit",
        )
    path = Path(text)
    if text.startswith((".", "/")) or path.exists():
        if path.is_dir():
            root = path.resolve() == access.settings.root_path.resolve()
            content = copy_source(path.resolve(), directory, most, skipped=OF_PROJECTS if root else ())
            source = _WheelSource(path=directory, identity=f"{path.resolve().name}/ sha256:{content}")
            return _with_git_version(source, path.resolve())
        if not path.is_file():
            raise UsageError(
                "path-not-found",
                f"{path} does not exist",
                hint="pass an existing directory or archive, or a package: NAME==VERSION",
            )
        copy, content = _copied(path.resolve(), directory, most)
        return _WheelSource(path=copy, identity=f"{path.name} sha256:{content}")
    try:
        requirement = Requirement(text)
    except InvalidRequirement as error:
        raise UsageError(
            "requirement-invalid",
            f"{text!r} is not a package: {error}",
            hint="write NAME==VERSION, such as torch-scatter==2.1.2",
        ) from error
    index = package_index(access)
    name = canonicalize_name(requirement.name)
    files = uv_locker(index).project(name, replace(lock, cutoff=None))  # the solve chose the release
    file, version = choose_sdist(requirement, files)
    fetched = fetch_sdist(index, file, access.settings.cache_path / "sdists")
    copy, content = _copied(fetched, directory, most)
    if content != file.sha256:
        raise DownloadError(
            "hash-mismatch",
            f"{fetched}: expected sha256 {file.sha256}, found {content}",
            hint=f"delete it and run the command again: rm {fetched}",
        )
    return _WheelSource(
        path=copy, identity=f"{file.filename} sha256:{content}", name=name, version=str(version)
    )


def _with_git_version(source: _WheelSource, directory: Path) -> _WheelSource:
    """Return the source with the version from git, if its build would query git."""
    if not read_project(source.path).version_variable:
        return source
    try:
        version = git_version(directory)
    except NoGitVersionError as error:
        return replace(source, untagged=str(error))
    return replace(source, tagged=version, identity=f"{source.identity} version {version}")


def _copied(archive: Path, directory: Path, most: int) -> tuple[Path, str]:
    """Copy an archive into a separate directory, so that the build cannot read other files.

    Return path and sha256.
    """
    directory.mkdir()
    copy, whole = directory / archive.name, hashlib.sha256()
    try:
        with open_file(archive.parent, archive.name, most) as fd, copy.open("xb") as out:
            for data in read_chunks(fd, archive.name, most):
                whole.update(data)
                out.write(data)
    except OSError as error:
        raise UsageError(
            *os_problem("copy", archive, error), hint="raise the limit: --limit scratch=..."
        ) from error
    return copy, whole.hexdigest()


def _clone(url: str, commit: str, directory: Path, most: int) -> None:
    """Clone a commit and its submodules. Raises UsageError if git fails or needs more than `most` bytes."""
    if shutil.which("git") is None:
        raise ToolError("tool-missing", "git is not installed", hint="install it: apt-get install git")
    directory.mkdir(parents=True)
    _run_git(
        directory,
        (
            ("init", "--quiet"),
            ("fetch", "--quiet", "--depth", "1", url, commit),
            ("checkout", "--quiet", "FETCH_HEAD"),
            ("submodule", "--quiet", "update", "--init", "--recursive", "--depth", "1"),
        ),
        f"{url} at {commit[:12]}",
        most,
    )


def _run_git(directory: Path, commands: Iterable[tuple[str, ...]], title: str, most: int) -> None:
    """Run git commands. Raises UsageError if one fails or if they need more than `most` bytes."""
    reserve = shutil.disk_usage(directory).free - most
    for argv in commands:
        with tempfile.TemporaryFile() as errors:
            process = subprocess.Popen(
                ["git", "-C", str(directory), *argv],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=errors,
            )
            try:
                while process.poll() is None:
                    if shutil.disk_usage(directory).free < reserve:
                        raise UsageError(
                            "source-too-large",
                            f"{title} is larger than the {most:,} bytes that are free for it",
                            hint="free disk space in the store, or use another store",
                        )
                    with suppress(subprocess.TimeoutExpired):
                        process.wait(timeout=POLL_SECONDS)
            finally:
                if process.poll() is None:
                    process.kill()
                    process.wait()
            errors.seek(max(0, errors.seek(0, os.SEEK_END) - 300))
            if process.returncode:
                words = printable(errors.read().decode(errors="replace").strip())
                raise UsageError(
                    "git-failed",
                    f"git cannot fetch {title}: {words}",
                    hint="check the address and the commit with git fetch",
                )


def _tools(
    access: Access,
    request: CompileRequest,
    lock: Lock,
    requires: Iterable[str],
    progress: Progress,
    *,
    isolated: bool,
) -> dict[LockedWheel, Path]:
    """Return the cached build tools that the image does not provide, and the wheels in `beside`."""
    target = request.target
    extra_wheels = {wheel: path for path in request.beside if (wheel := _own_wheel(path))}
    visible = {} if isolated else {package.name: package.version for package in lock.packages}
    there = visible | {wheel.name: wheel.version for wheel in extra_wheels}
    needed = {
        requirement
        for requirement in (*OWN_TOOLS, *requires)
        if not _satisfied(Requirement(requirement), there)
    }
    named = {canonicalize_name(Requirement(requirement).name) for requirement in needed}
    runtime = next((package.version for package in lock.wheels if package.name == "nvidia-cuda-runtime"), "")
    bounds = tuple(f"{name}=={'.'.join(runtime.split('.')[:2])}.*" for name in NVCC) if runtime else ()
    # Use the versions of the image, because the headers of the libraries must fit the compiler.
    locked = [
        w for w in lock.wheels if w.name not in named and (not isolated or w.name.startswith("nvidia-"))
    ]
    index = package_index(access)
    locker = uv_locker(index)
    question = WheelRequest(
        lock=Lock(
            target=f"the tools of {target.name}",
            content_hash="",
            python=lock.python,
            platform=lock.platform,
            solver="",
            wheels=(),
            cutoff=tools_cutoff(access, target, locked),
        ),
        requirements=(*sorted(needed), *(NVCC[:1] if runtime and has_nvcc(target) else ())),
        constraints=(*bounds, *(f"{wheel.name}=={wheel.version}" for wheel in locked)),
    )
    wheels = locker.wheels(question, locker.solve(question), progress)
    cache = PackageCache(access.settings.cache_path, index)
    fetched = cache.fetch(
        wheels, lambda missing: locker.addresses(replace(question.lock, wheels=missing)), progress
    )
    return fetched | extra_wheels


def tools_cutoff(access: Access, target: Target, locked: Iterable[LockedWheel]) -> ReleaseCutoff | None:
    """Return the cutoff for build tools, None for any age. Locked packages keep their versions."""
    cutoff = release_cutoff(access, target, None, LockOptions())
    names = (wheel.name for wheel in locked)
    return cutoff and replace(cutoff, allowed=tuple(sorted({*cutoff.allowed, *names})))


def _own_wheel(path: Path) -> LockedWheel:
    name, version, *_ = parse_wheel_filename(path.name)
    return LockedWheel(
        name=name,
        version=str(version),
        filename=path.name,
        sha256=_sha256(path.parent, path.name),
        size=path.stat().st_size,
    )


def _unpack_tools(wheels: Mapping[LockedWheel, Path], directory: Path, most: int) -> None:
    """Unpack wheels after checking their hashes: packages to `site`, programs to `bin`."""
    (directory / "bin").mkdir(parents=True)
    remaining = most
    try:
        for wheel, path in wheels.items():
            remaining -= unpack_wheel(path, directory, sha256=wheel.sha256, most=remaining)
    except OSError as error:
        raise BuildError(
            "build-tool-invalid",
            f"cannot unpack a build tool: {error}",
            hint="free disk space or raise --limit scratch=..., then run it again",
        ) from error
    shutil.copyfile(BUILDER, directory / BUILDER.name)


def _record(
    request: CompileRequest, source: _WheelSource, image: Image, *, isolated: bool
) -> dict[str, object]:
    return {
        "source": source.identity,
        "target": request.target.name,
        "image": image.manifest,
        "isolated": isolated,
        "capabilities": list(request.capabilities or request.target.capabilities),
        "builder": f"imagefactory {__version__}",
    }


def _recorded_requires(directory: Path, record: Mapping[str, object]) -> tuple[str, ...] | None:
    """Return the backend's requirements from an earlier build with the same inputs, or None."""
    for _, row in _records(directory):
        try:
            if {**row, **record} == row:
                return check_requires(row["requires"])
        except (ValueError, KeyError, TypeError):
            continue
    return None


def _records(directory: Path) -> Iterator[tuple[str, Any]]:
    """Yield the names and records of wheels. The directory may belong to an untrusted project."""
    try:
        names = list_names(directory.resolve(), MOST_NAMES)
    except OSError:
        return
    for name in (name.removesuffix(".json") for name in names if name.endswith(".whl.json")):
        try:
            yield name, parse_json(read_file(directory, f"{name}.json", LONGEST_RECORD))
        except (OSError, ValueError):
            continue


def _find_built_wheel(directory: Path, record: Mapping[str, object]) -> Path | None:
    """Return the wheel with an equal record, or None."""
    for name, row in _records(directory):
        try:
            if {**record, "sha256": row["sha256"]} == row and _sha256(directory, name) == row["sha256"]:
                return directory / name
        except (OSError, ValueError, KeyError, TypeError):
            continue
    return None


def _sha256(directory: Path, name: str) -> str:
    whole = hashlib.sha256()
    with open_file(directory, name, UNBOUNDED) as fd:
        for data in read_chunks(fd, name, UNBOUNDED):
            whole.update(data)
    return whole.hexdigest()


def _record_path(wheel: Path) -> Path:
    return wheel.with_name(f"{wheel.name}.json")
