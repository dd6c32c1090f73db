"""A wheel of a package that has none: compiled once, in the image that it is for, without network.

source, tools -> the image's Python compiles -> a wheel, and a record of all that made it
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
from imagefactory.actions.locked import require_lock
from imagefactory.build.wheel_layer import check_wheel, unpack_wheel
from imagefactory.errors import BuildError, DownloadError, LimitError, ToolError, UsageError, os_problem
from imagefactory.extras.wheels.wheel_builder import ISOLATED
from imagefactory.fs import explain_full_disk, locked_temporary_directory, replace_text, replacing
from imagefactory.gpu.builds import rocm_of
from imagefactory.gpu.knowledge.packages import source_build
from imagefactory.lock.download import PackageCache
from imagefactory.lock.git import NoGitVersionError, git_version
from imagefactory.lock.pypi.local import wheel_metadata
from imagefactory.lock.pypi.offers import choose_sdist, fetch_sdist
from imagefactory.lock.pypi.question import WheelRequest
from imagefactory.lock.pypi.requirements import misfit
from imagefactory.lock.pypi.sources import MOST_REQUIRES, SourceProject, copy_source, read_project
from imagefactory.lock.pypi.unbuilt import has_nvcc
from imagefactory.model import CommandResult, Lock, LockedWheel, Mount, RunSpec, Target
from imagefactory.oci.manifests import Image
from imagefactory.progress import Progress
from imagefactory.project import Project
from imagefactory.runtime.limits import decide_limits, read_capacity
from imagefactory.runtime.protocol import Runner
from imagefactory.serialize import parse_json
from imagefactory.trees import list_names, open_file, printable, read_chunks, read_file, remove_tree

BUILDER = Path(__file__).with_name("wheel_builder.py")
OF_PROJECTS = ("recipes", "lockfiles", "definitions", "wheels", "imagefactory.toml")
"""What imagefactory has in a project's root, which is no part of a package there."""
BUILD_DIRECTORIES = ("/build/out", "/build/tools", "/build/cuda")
LEGACY = ("setuptools<81",)
"""The last setuptools with pkg_resources, as its own warning says."""
OWN_TOOLS = ("pip", "setuptools", "wheel", "ninja", "packaging")
NVCC = ("nvidia-cuda-nvcc", "nvidia-cuda-crt", "nvidia-nvvm")
"""From CUDA 13 on NVIDIA's wheels hold the whole compiler; those before hold its last step alone."""
_GIT = re.compile(
    r"git\+(?P<url>(https|ssh|file)://[^@#\s]+)@(?P<commit>[0-9a-f]{40})"
    r"(#subdirectory=(?P<folder>[A-Za-z0-9_+-][A-Za-z0-9._+/-]*))?"
)
FIRST_TIME = "315532800"
"""1980, the first time that a wheel can say of its files."""
TIMEOUT = 86400
"""Seconds of a compilation; the largest packages take half of it on a few cores."""
UNBOUNDED = 1 << 62
MAX_JOBS = str((1 << 31) - 1)
"""The depth by which git fetches all commits, also those that an earlier fetch left out."""
MOST_NAMES, LONGEST_RECORD = 10_000, 1 << 20
POLL_SECONDS = 0.2
"""Seconds between looks at the disk while git fills it."""
_MISSING = re.compile(r"ModuleNotFoundError: No module named '([A-Za-z0-9_.]+)'")
_TAIL, _LAST = 30, 10
_ERROR = re.compile(r":\d+: (fatal )?error: |\(\d+\): (catastrophic )?error|nvcc fatal|ld: (?!warning)")
"""How gcc, nvcc and ld tell of what stops them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileRequest:
    """What to compile for which target, and the folder that gets it.

    `source` is a requirement, a folder, an archive or `git+URL@COMMIT`. `capabilities` (`8.0`) are those to
    compile for, empty for the target's. `limits` are a run's, `timeout` is in seconds, None for no end.
    `beside` are wheels that were built here and that building it needs. `label` is what messages call it.
    `taken` are names of wheels in `folder` that other targets use, and that stay as they are.
    """

    source: str
    target: Target
    folder: Path
    capabilities: tuple[str, ...] = ()
    limits: tuple[tuple[str, int | None], ...] = ()
    timeout: float | None = TIMEOUT
    beside: tuple[Path, ...] = ()
    label: str = ""
    taken: frozenset[str] = frozenset()

    @property
    def folders(self) -> tuple[Path, Path]:
        """Where its wheel may be: the second for another wheel of a name in `taken`."""
        return self.folder, self.folder / self.target.name

    @property
    def title(self) -> str:
        """What messages call the source."""
        return self.label or self.source


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileResult:
    """The wheel; `made` is false where it was there, of the same source, image and tools."""

    wheel: Path
    made: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class _WheelSource:
    """`path` is an archive or a folder, copied; `told` names it and its content.

    `name` and `version` are those that its wheel must have, empty where only the wheel says them. `tagged` is
    the version that git gives it, where its build would ask git; `untagged` says why there is none.
    """

    path: Path
    told: str
    name: str = ""
    version: str = ""
    tagged: str = ""
    untagged: str = ""


def compile_wheel(factory: Project, asked: CompileRequest, progress: Progress) -> CompileResult:
    """Raises UsageError for a source that is none, BuildError for a target that is not built and for a
    package that does not compile, and what locking and fetching raise."""
    target = asked.target
    check_not_amd(target)
    lock, image = require_lock(factory, target), stored_image(factory, target)
    if image is None:
        raise BuildError(
            "image-not-built", f"{target.name} is not built", hint=f"imagefactory build {target.name}"
        )
    return compile_in(factory, asked, BuildImage(lock=lock, image=image), progress)


def check_not_amd(target: Target) -> None:
    """Raises UsageError for a target whose GPUs no compiler here is for."""
    if rocm_of(target.cuda):
        raise UsageError(
            "amd-not-supported",
            f"{target.name} is for AMD GPUs: imagefactory has no compiler for them",
            hint="compile it where ROCm is installed, and name the wheel in the recipe: ./wheels/NAME.whl",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildImage:
    """The image that a package is built in, and what is locked of it."""

    lock: Lock
    image: Image


def compile_in(
    factory: Project, asked: CompileRequest, within: BuildImage, progress: Progress
) -> CompileResult:
    """Compiles in an image of the store. Raises as `compile_wheel`.

    The image's packages are hidden where the package neither names nor imports one of them to be built, and
    shown to it where its build misses a module.
    """
    runner = make_runner(factory, "unshare", asked.target.name, progress)
    runner.require()
    layout = factory.layout
    bounds = decide_limits(dict(asked.limits), read_capacity(layout.scratch))
    most = UNBOUNDED if bounds.scratch is None else bounds.scratch
    with layout.in_use(progress), locked_temporary_directory("compile-", layout.scratch) as scratch:
        source = _take_source(factory, asked.source, within.lock, scratch / "source", most)
        project = read_project(source.path)
        source = replace(source, name=source.name or project.name, version=source.version or project.version)
        if source.tagged:
            progress.note(f"{asked.title}: git has its version: {source.tagged}")
        job = _WheelBuild(
            factory=factory,
            asked=asked,
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
                f"{asked.title}: {error.message}, so it is built with the packages of {asked.target.name}"
            )
            return _build(job, progress, isolated=False)


class _MissingModuleError(BuildError):
    """A build that did not find a module."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _WheelBuild:
    """One package on its way to a wheel; `most` are the bytes that it may take of the disk."""

    factory: Project
    asked: CompileRequest
    within: BuildImage
    source: _WheelSource
    project: SourceProject
    most: int
    scratch: Path
    runner: Runner


def needs_packages(project: SourceProject, lock: Lock) -> bool:
    """Whether a package names or imports what the target has, as extensions of torch do, to be built."""
    there = {package.name: package.version for package in lock.packages if package.name not in OWN_TOOLS}
    named = any(_satisfied(Requirement(text), there) for text in project.requires)
    return named or any(canonicalize_name(module) in there for module in project.imports)


def _satisfied(requirement: Requirement, there: Mapping[str, str]) -> bool:
    version = there.get(canonicalize_name(requirement.name))
    try:
        return version is not None and requirement.specifier.contains(version, prereleases=True)
    except InvalidVersion:  # conda's may be none
        return True


def _build(job: _WheelBuild, progress: Progress, *, isolated: bool) -> CompileResult:
    asked, source, lock = job.asked, job.source, job.within.lock
    record = _record(asked, source, job.within.image, isolated=isolated)
    fixed = (*job.project.requires, *(LEGACY if "pkg_resources" in job.project.imports else ()))
    wanted = next(
        (w for folder in asked.folders if (w := _recorded_requires(folder, record)) is not None), None
    )
    steps = _BuildSteps(job, lock=lock, isolated=isolated)
    tools = _tools(job.factory, asked, lock, (*fixed, *(wanted or ())), progress, isolated=isolated)
    if wanted is None:
        steps.lay(tools)
        wanted = steps.ask(progress)
        if wanted:
            tools = _tools(job.factory, asked, lock, (*fixed, *wanted), progress, isolated=isolated)
    record |= {"requires": list(wanted), "tools": [f"{w.filename} sha256:{w.sha256}" for w in tools]}
    if there := next((path for folder in asked.folders if (path := _find_built_wheel(folder, record))), None):
        return CompileResult(wheel=there, made=False)
    steps.lay(tools)
    steps.run("wheel", f"{asked.title}: compile in {asked.target.name}", progress)
    made = _take_wheel(asked, source, lock, job.scratch, job.most)
    folder = asked.folders[_is_wheel_name_used(asked, made)]
    wheel = folder / made.filename
    with explain_full_disk(asked.folder):
        folder.mkdir(parents=True, exist_ok=True)
        with replacing(wheel) as out, open_file(job.scratch / "wheel", made.filename, made.size) as fd:
            out.writelines(read_chunks(fd, made.filename, made.size))
        text = json.dumps({**record, "sha256": made.sha256}, indent=2) + "\n"
        replace_text(_record_path(wheel), text)
    return CompileResult(wheel=wheel, made=True)


def _is_wheel_name_used(asked: CompileRequest, made: LockedWheel) -> bool:
    """Whether another target uses another wheel of this name. Raises BuildError for a link out."""
    try:
        taken = made.filename in asked.taken and _sha256(asked.folder, made.filename) != made.sha256
    except OSError:
        taken = False
    if taken and not asked.folders[1].resolve().is_relative_to(asked.folder.resolve()):
        raise BuildError(
            "wheel-folder-outside",
            f"{asked.folders[1]} is a link to outside {asked.folder}",
            hint="remove it",
        )
    return taken


@dataclass(slots=True)
class _BuildSteps:
    """What runs in the image, with the tools that were laid last."""

    job: _WheelBuild
    lock: Lock
    isolated: bool
    prepared: bool = False
    laid: Mapping[LockedWheel, Path] | None = None

    def lay(self, tools: Mapping[LockedWheel, Path]) -> None:
        if tools == self.laid:
            return
        folder = self.job.scratch / "tools"
        if folder.exists():
            remove_tree(folder)
        _lay_tools(tools, folder, self.job.most)
        self.laid = tools

    def ask(self, progress: Progress) -> tuple[str, ...]:
        """What the build backend asks for beyond pyproject.toml. Raises BuildError for what is no list."""
        asked = self.job.asked
        self.run("requires", f"{asked.title}: what it is built with", progress)
        try:
            listed = parse_json(read_file(self.job.scratch / "out", "requires.json", LONGEST_RECORD))
            return check_requires(listed)
        except (OSError, ValueError, TypeError) as error:
            raise BuildError(
                "build-requires-invalid",
                f"{asked.title}: cannot read its build requirements: {printable(str(error))}",
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
            done = job.runner.run(job.within.image, spec)
        missing = _MISSING.search(done.stdout + done.stderr) if done.returncode and self.isolated else None
        if missing:
            raise _MissingModuleError("build-module-missing", f"its build imports {missing[1]}")
        _check_compilers(job.asked, done, job.source.untagged)


def check_requires(listed: object) -> tuple[str, ...]:
    """Requirements that an untrusted build wrote. Raises ValueError or TypeError for anything else."""
    if not isinstance(listed, list) or len(listed) > MOST_REQUIRES:
        raise ValueError(f"it is not a list of up to {MOST_REQUIRES} packages")
    found = [Requirement(one) for one in listed]
    if elsewhere := next((one for one in found if one.url), None):
        raise ValueError(f"it requires {elsewhere.name} from an address, not from the index")
    return tuple(sorted(map(str, found)))


def _take_wheel(
    asked: CompileRequest, source: _WheelSource, lock: Lock, scratch: Path, most: int
) -> LockedWheel:
    """Copies the one wheel that the package's build left, to a folder that no build can write to.

    Raises BuildError for anything but one sound wheel of that package, for that Python and platform.
    """
    out, kept = scratch / "out", scratch / "wheel"
    kept.mkdir()
    whole, size = hashlib.sha256(), 0
    try:
        names = [name for name in list_names(out, MOST_NAMES) if name.endswith(".whl")]
        if len(names) != 1:
            raise BuildError(
                "wheel-not-written", f"{asked.title}: expected one wheel, and the build wrote {len(names)}"
            )
        name = printable(names[0])
        with open_file(out, names[0], most) as fd, (kept / name).open("xb") as file:
            for data in read_chunks(fd, name, most):
                whole.update(data)
                file.write(data)
                size += len(data)
    except OSError as error:
        raise BuildError(*os_problem("copy", f"{error.filename} of {asked.title}", error)) from error
    try:
        project, version, *_ = parse_wheel_filename(name)
    except (InvalidWheelFilename, InvalidVersion) as error:
        raise BuildError(
            "wheel-invalid", f"{asked.title}: the build wrote an invalid wheel: {error}"
        ) from error
    # A label of its own (`+cu130`) may say what it was built for; the release is its source's.
    if project != (source.name or project) or (
        source.version and Version(version.public) != Version(Version(source.version).public)
    ):
        expected = f"{source.name} {source.version}".rstrip()
        raise BuildError(
            "wheel-mismatch", f"{asked.title}: expected a wheel of {expected}, and the build wrote {name}"
        )
    wheel = LockedWheel(
        name=project, version=str(version), filename=name, sha256=whole.hexdigest(), size=size
    )
    if fault := misfit(wheel, lock.python, lock.platform):
        raise BuildError("wheel-incompatible", f"{asked.title}: {fault}")
    check_wheel(kept / name, wheel.sha256)
    if (said := wheel_metadata(kept / name)) != (project, version):
        found = f"{said[0]} {said[1]}" if said else "no name"
        raise BuildError(
            "wheel-mismatch",
            f"{asked.title}: expected {project} {version} in the metadata of {name}, found {found}",
        )
    return wheel


def _spec(job: _WheelBuild, step: str) -> RunSpec:
    asked, source, scratch = job.asked, job.source, job.scratch
    mounts = (
        Mount(source=scratch / "source", target="/build/source", writable=True, scratch=True),
        Mount(source=scratch / "tools", target="/build/tools", bind=True),
        Mount(source=scratch / "out", target="/build/out", writable=True, scratch=True),
    )
    inside = "/build/source" if source.path.is_dir() else f"/build/source/{source.path.name}"
    capabilities = asked.capabilities or asked.target.capabilities
    variables = {
        "SOURCE_DATE_EPOCH": FIRST_TIME,
        "PYTHONHASHSEED": "0",
        "MAX_JOBS": str(job.factory.settings.worker_count),
        "TORCH_CUDA_ARCH_LIST": ";".join(capabilities),
        "FORCE_CUDA": "1" if has_nvcc(asked.target) else "0",
    }
    if known := source_build(source.name):
        variables |= known.variables(capabilities)
    if source.tagged:
        variables[job.project.version_variable] = source.tagged
    return RunSpec(
        argv=("python", f"/build/tools/{BUILDER.name}", step, inside, *BUILD_DIRECTORIES),
        environment=tuple(variables.items()),
        mounts=mounts,
        limits=asked.limits,
        timeout=asked.timeout,
    )


def what_failed(said: str) -> str:
    """Of what building a wheel said: a compiler's first error, however far above, and the end."""
    lines = said.splitlines()
    first = next((number for number, line in enumerate(lines) if _ERROR.search(line)), len(lines))
    end = max(len(lines) - _TAIL, 0)
    if first >= end:
        return "\n".join(lines[end:])
    return "\n".join([*lines[first : first + _TAIL], "[...]", *lines[-_LAST:]])


def _check_compilers(asked: CompileRequest, done: CommandResult, untagged: str = "") -> None:
    """Raises BuildError with the first error of a compiler that failed, and the last words of all.

    `untagged` says why git gives its source no version, where it would ask git.
    """
    message, hint = done.over
    if done.timed_out:
        message = f"the build was stopped at its limit time={asked.timeout:.0f}"
        hint = "raise it with `--limit time=...`, or set time=none"
    if message:
        raise LimitError("limit-reached", f"{asked.title}: {message}", hint=hint)
    if done.returncode == 0:
        return
    said = what_failed(done.stdout + done.stderr)
    hint = "add the packages and Debian libraries (system: in a recipe) that it needs to the target"
    if not has_nvcc(asked.target):
        hint = f"if it needs nvcc: PyPI has it from CUDA 13 on, and this target is for {asked.target.cuda}"
    if untagged:
        hint = (
            f"its version comes from git, but {untagged}: tag a commit of it (git tag v1.0), or "
            'set version = "1.0" under [project] in its pyproject.toml and remove version from dynamic'
        )
    raise BuildError(
        "compile-failed", f"{asked.title} does not compile in {asked.target.name}:\n{said}", hint=hint
    )


def _take_source(access: Access, text: str, lock: Lock, folder: Path, most: int) -> _WheelSource:
    if found := _GIT.fullmatch(text):
        clone = folder.with_name("clone")
        room = min(most, shutil.disk_usage(clone.parent).free // 2)
        _clone(found["url"], found["commit"], clone, room)
        inside = clone / (found["folder"] or ".")
        if not inside.is_dir() or not inside.resolve().is_relative_to(clone.resolve()):
            raise UsageError(
                "source-folder-missing",
                f"{text} has no directory {found['folder']}",
                hint="correct its subdirectory",
            )
        copy_source(inside, folder, most)
        if read_project(folder).version_variable:  # with all commits, as a version counts them
            fetch = ("fetch", "--quiet", "--tags", "--depth", MAX_JOBS, found["url"], found["commit"])
            _run_git(clone, (fetch,), f"the history of {text}", room)
        source = _with_git_version(_WheelSource(path=folder, told=text), inside)
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
            content = copy_source(path.resolve(), folder, most, skipped=OF_PROJECTS if root else ())
            source = _WheelSource(path=folder, told=f"{path.resolve().name}/ sha256:{content}")
            return _with_git_version(source, path.resolve())
        if not path.is_file():
            raise UsageError(
                "path-not-found", f"{path} does not exist", hint="name a directory, an archive or a package"
            )
        copy, content = _copied(path.resolve(), folder, most)
        return _WheelSource(path=copy, told=f"{path.name} sha256:{content}")
    try:
        requirement = Requirement(text)
    except InvalidRequirement as error:
        raise UsageError(
            "requirement-invalid", f"{text!r} is not a package: {error}", hint="write torch-scatter==2.1.2"
        ) from error
    index = package_index(access)
    name = canonicalize_name(requirement.name)
    file, version = choose_sdist(requirement, uv_locker(index).project(name, lock))
    fetched = fetch_sdist(index, file, access.settings.cache_path / "sdists")
    copy, content = _copied(fetched, folder, most)
    if content != file.sha256:
        raise DownloadError(
            "hash-mismatch",
            f"{fetched}: expected sha256 {file.sha256}, found {content}",
            hint=f"rm {fetched}",
        )
    return _WheelSource(path=copy, told=f"{file.filename} sha256:{content}", name=name, version=str(version))


def _with_git_version(source: _WheelSource, folder: Path) -> _WheelSource:
    """The source of a folder with the version that git gives that folder, where its build would ask git."""
    if not read_project(source.path).version_variable:
        return source
    try:
        version = git_version(folder)
    except NoGitVersionError as error:
        return replace(source, untagged=str(error))
    return replace(source, tagged=version, told=f"{source.told} version {version}")


def _copied(archive: Path, folder: Path, most: int) -> tuple[Path, str]:
    """An archive alone in its folder, as what lies beside it is not shown to its build, and its sha256."""
    folder.mkdir()
    copy, whole = folder / archive.name, hashlib.sha256()
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


def _clone(url: str, commit: str, folder: Path, most: int) -> None:
    """The files of a commit, its submodules' too.

    Raises UsageError, also where that takes more than `most` bytes of the disk.
    """
    if shutil.which("git") is None:
        raise ToolError("tool-missing", "git is not installed", hint="apt-get install git")
    folder.mkdir(parents=True)
    _run_git(
        folder,
        (
            ("init", "--quiet"),
            ("fetch", "--quiet", "--depth", "1", url, commit),
            ("checkout", "--quiet", "FETCH_HEAD"),
            ("submodule", "--quiet", "update", "--init", "--recursive", "--depth", "1"),
        ),
        f"{url} at {commit[:12]}",
        most,
    )


def _run_git(folder: Path, commands: Iterable[tuple[str, ...]], title: str, most: int) -> None:
    """Run git commands. Raises UsageError for one that fails, and for more than `most` bytes of all."""
    reserve = shutil.disk_usage(folder).free - most
    for argv in commands:
        with tempfile.TemporaryFile() as said:
            process = subprocess.Popen(
                ["git", "-C", str(folder), *argv],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=said,
            )
            try:
                while process.poll() is None:
                    if shutil.disk_usage(folder).free < reserve:
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
            said.seek(max(0, said.seek(0, os.SEEK_END) - 300))
            if process.returncode:
                words = printable(said.read().decode(errors="replace").strip())
                raise UsageError("git-failed", f"git cannot fetch {title}: {words}")


def _tools(
    access: Access,
    asked: CompileRequest,
    lock: Lock,
    requires: Iterable[str],
    progress: Progress,
    *,
    isolated: bool,
) -> dict[LockedWheel, Path]:
    """What it is built with and is not shown to it otherwise, in the cache; with the wheels beside it."""
    target = asked.target
    beside = {wheel: path for path in asked.beside if (wheel := _own_wheel(path))}
    shown = {} if isolated else {package.name: package.version for package in lock.packages}
    there = shown | {wheel.name: wheel.version for wheel in beside}
    wanted = {one for one in (*OWN_TOOLS, *requires) if not _satisfied(Requirement(one), there)}
    named = {canonicalize_name(Requirement(one).name) for one in wanted}
    runtime = next((package.version for package in lock.wheels if package.name == "nvidia-cuda-runtime"), "")
    bounds = tuple(f"{name}=={'.'.join(runtime.split('.')[:2])}.*" for name in NVCC) if runtime else ()
    # What the image has is taken in its version: the libraries' headers must be those of the compiler.
    kept = (w for w in lock.wheels if w.name not in named and (not isolated or w.name.startswith("nvidia-")))
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
        ),
        requirements=(*sorted(wanted), *(NVCC[:1] if runtime and has_nvcc(target) else ())),
        constraints=(*bounds, *(f"{wheel.name}=={wheel.version}" for wheel in kept)),
    )
    wheels = locker.wheels(question, locker.solve(question), progress)
    cache = PackageCache(access.settings.cache_path, index)
    fetched = cache.fetch(
        wheels, lambda missing: locker.addresses(replace(question.lock, wheels=missing)), progress
    )
    return fetched | beside


def _own_wheel(path: Path) -> LockedWheel:
    name, version, *_ = parse_wheel_filename(path.name)
    return LockedWheel(
        name=name,
        version=str(version),
        filename=path.name,
        sha256=_sha256(path.parent, path.name),
        size=path.stat().st_size,
    )


def _lay_tools(wheels: Mapping[LockedWheel, Path], folder: Path, most: int) -> None:
    """Unpacks wheels, each held to its locked hash: packages to `site`, programs to `bin`."""
    (folder / "bin").mkdir(parents=True)
    left = most
    try:
        for wheel, path in wheels.items():
            left -= unpack_wheel(path, folder, sha256=wheel.sha256, most=left)
    except OSError as error:
        raise BuildError("build-tool-invalid", f"cannot unpack a build tool: {error}") from error
    shutil.copyfile(BUILDER, folder / BUILDER.name)


def _record(
    asked: CompileRequest, source: _WheelSource, image: Image, *, isolated: bool
) -> dict[str, object]:
    return {
        "source": source.told,
        "target": asked.target.name,
        "image": image.manifest,
        "isolated": isolated,
        "capabilities": list(asked.capabilities or asked.target.capabilities),
        "builder": f"imagefactory {__version__}",
    }


def _recorded_requires(folder: Path, record: Mapping[str, object]) -> tuple[str, ...] | None:
    """What the backend asked for when the same source was built in the same image; None if it was not."""
    for _, held in _records(folder):
        try:
            if {**held, **record} == held:
                return check_requires(held["requires"])
        except (ValueError, KeyError, TypeError):
            continue
    return None


def _records(folder: Path) -> Iterator[tuple[str, Any]]:
    """The wheels' names and records; the folder may have come with an untrusted project."""
    try:
        names = list_names(folder.resolve(), MOST_NAMES)
    except OSError:
        return
    for name in (name.removesuffix(".json") for name in names if name.endswith(".whl.json")):
        try:
            yield name, parse_json(read_file(folder, f"{name}.json", LONGEST_RECORD))
        except (OSError, ValueError):
            continue


def _find_built_wheel(folder: Path, record: Mapping[str, object]) -> Path | None:
    """The wheel of an equal record."""
    for name, held in _records(folder):
        try:
            if {**record, "sha256": held["sha256"]} == held and _sha256(folder, name) == held["sha256"]:
                return folder / name
        except (OSError, ValueError, KeyError, TypeError):
            continue
    return None


def _sha256(folder: Path, name: str) -> str:
    whole = hashlib.sha256()
    with open_file(folder, name, UNBOUNDED) as fd:
        for data in read_chunks(fd, name, UNBOUNDED):
            whole.update(data)
    return whole.hexdigest()


def _record_path(wheel: Path) -> Path:
    return wheel.with_name(f"{wheel.name}.json")
