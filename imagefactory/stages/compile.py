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
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename
from packaging.version import InvalidVersion

from imagefactory import __version__
from imagefactory.access import Access, package_index, uv_locker
from imagefactory.documents import parse_json
from imagefactory.engines.wheel_layer import check_wheel, unpack_wheel
from imagefactory.errors import BuildError, DownloadError, LimitError, ToolError, UsageError
from imagefactory.factory import Factory
from imagefactory.files import explain_full_disk, locked_folder, replace_text, replacing
from imagefactory.gpu.builds import rocm_of
from imagefactory.lock.download import PackageCache
from imagefactory.lock.pypi.local import wheel_says
from imagefactory.lock.pypi.question import WheelQuestion
from imagefactory.lock.pypi.requirements import misfit
from imagefactory.lock.pypi.sdist import choose_sdist, fetch_sdist
from imagefactory.lock.pypi.sources import copy_source, read_project
from imagefactory.model import Completed, Lock, LockedWheel, Mount, RunSpec, Target
from imagefactory.oci.model import Image
from imagefactory.progress import Progress
from imagefactory.runners.limits import decide_limits, read_room
from imagefactory.stages.locked import require_lock
from imagefactory.stages.runner import make_runner
from imagefactory.stages.stored import stored_image
from imagefactory.trees import list_names, open_file, printable, read_chunks, read_file, remove_tree

BUILDER = Path(__file__).parents[1] / "engines" / "wheel_builder.py"
OWN_TOOLS = ("pip", "setuptools", "wheel", "ninja", "packaging")
NVCC = ("nvidia-cuda-nvcc", "nvidia-cuda-crt", "nvidia-nvvm")
"""From CUDA 13 on NVIDIA's wheels hold the whole compiler; those before hold its last step alone."""
_GIT = re.compile(r"git\+(?P<url>(https|ssh|file)://[^@#\s]+)@(?P<commit>[0-9a-f]{40})")
FIRST_TIME = "315532800"
"""1980, the first time that a wheel can say of its files."""
TIMEOUT = 86400
"""Seconds of a compilation; the largest packages take half of it on a few cores."""
UNBOUNDED = 1 << 62
MOST_NAMES, LONGEST_RECORD = 10_000, 1 << 20
LOOK_AGAIN = 0.2
"""Seconds between looks at the disk while git fills it."""
_TAIL, _LAST = 30, 10
_ERROR = re.compile(r":\d+: (fatal )?error: |\(\d+\): (catastrophic )?error|nvcc fatal|ld: (?!warning)")
"""How gcc, nvcc and ld tell of what stops them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileAsk:
    """What to compile for which target, and the folder that gets it.

    `source` is a requirement, a folder, an archive or `git+URL@COMMIT`. `capabilities` (`8.0`) are those to
    compile for, empty for the target's. `limits` are a run's, `timeout` is in seconds, None for no end.
    """

    source: str
    target: Target
    folder: Path
    capabilities: tuple[str, ...] = ()
    limits: tuple[tuple[str, int | None], ...] = ()
    timeout: float | None = TIMEOUT


@dataclass(frozen=True, slots=True, kw_only=True)
class Compiled:
    """The wheel; `made` is false where it was there, of the same source, image and tools."""

    wheel: Path
    made: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class _Source:
    """`path` is an archive or a folder, copied; `told` names it and its content.

    `name` and `version` are those that its wheel must have, empty where only the wheel says them.
    """

    path: Path
    told: str
    name: str = ""
    version: str = ""


def compile_wheel(factory: Factory, asked: CompileAsk, progress: Progress) -> Compiled:
    """Raises UsageError for a source that is none, BuildError for a target that is not built and for a
    package that does not compile, and what locking and fetching raise."""
    target = asked.target
    if rocm_of(target.cuda):
        raise UsageError(
            f"{target.name} is for AMD's GPUs: nothing here compiles for them",
            hint="compile it where ROCm's compiler is, and name the wheel in the recipe: ./wheels/NAME.whl",
        )
    lock, image = require_lock(factory, target), stored_image(factory, target)
    if image is None:
        raise BuildError(f"{target.name} is not built yet", hint=f"imagefactory build {target.name}")
    runner = make_runner(factory, "unshare", target.name, progress)
    runner.require()
    layout = factory.layout
    bounds = decide_limits(dict(asked.limits), read_room(layout.scratch))
    most = UNBOUNDED if bounds.scratch is None else bounds.scratch
    with layout.in_use(progress), locked_folder("compile-", layout.scratch) as scratch:
        source = _take_source(factory, asked.source, lock, scratch / "source", most)
        project = read_project(source.path)
        source = replace(source, name=source.name or project.name)
        tools = _tools(factory, target, lock, project.requires, progress)
        record = _record(asked, source, image, tools)
        if there := _made_before(asked.folder, record):
            return Compiled(wheel=there, made=False)
        _lay_tools(tools, scratch / "tools", most)
        (scratch / "out").mkdir()
        runner.prepare(image, checked=False)
        spec = _spec(asked, source, scratch, factory.settings.worker_count)
        with progress.stage(f"{asked.source}: compile in {target.name}"):
            _refuse_failed(asked, runner.run(image, spec))
        made = _take_wheel(asked, source, lock, scratch, most)
        wheel = asked.folder / made.filename
        with explain_full_disk(asked.folder):
            asked.folder.mkdir(parents=True, exist_ok=True)
            with replacing(wheel) as out, open_file(scratch / "wheel", made.filename, made.size) as fd:
                out.writelines(read_chunks(fd, made.filename, made.size))
            text = json.dumps({**record, "sha256": made.sha256}, indent=2) + "\n"
            replace_text(_record_path(wheel), text)
    return Compiled(wheel=wheel, made=True)


def _take_wheel(asked: CompileAsk, source: _Source, lock: Lock, scratch: Path, most: int) -> LockedWheel:
    """Copies the one wheel that the package's build left, to a folder that no build can write to.

    Raises BuildError for anything but one sound wheel of that package, for that Python and platform.
    """
    out, kept = scratch / "out", scratch / "wheel"
    kept.mkdir()
    whole, size = hashlib.sha256(), 0
    try:
        names = [name for name in list_names(out, MOST_NAMES) if name.endswith(".whl")]
        if len(names) != 1:
            raise BuildError(f"{asked.source}: compiling left {len(names)} wheels")
        name = printable(names[0])
        with open_file(out, names[0], most) as fd, (kept / name).open("xb") as file:
            for data in read_chunks(fd, name, most):
                whole.update(data)
                file.write(data)
                size += len(data)
    except OSError as error:
        raise BuildError(
            f"{asked.source}: what compiling left cannot be taken: {error.filename}: {error.strerror}"
        ) from error
    try:
        project, version, *_ = parse_wheel_filename(name)
    except (InvalidWheelFilename, InvalidVersion) as error:
        raise BuildError(f"{asked.source}: compiling left no wheel: {error}") from error
    if project != (source.name or project) or str(version) != (source.version or str(version)):
        raise BuildError(
            f"{asked.source}: compiling left {name}, which is not {source.name} {source.version}".rstrip()
        )
    wheel = LockedWheel(
        name=project, version=str(version), filename=name, sha256=whole.hexdigest(), size=size
    )
    if fault := misfit(wheel, lock.python, lock.platform):
        raise BuildError(f"{asked.source}: {fault}")
    check_wheel(kept / name, wheel.sha256)
    if (said := wheel_says(kept / name)) != (project, version):
        raise BuildError(
            f"{asked.source}: {name} says to be {said[0]} {said[1]}" if said else f"{name} says no name"
        )
    return wheel


def _spec(asked: CompileAsk, source: _Source, scratch: Path, workers: int) -> RunSpec:
    mounts = (
        Mount(source=scratch / "source", target="/build/source", writable=True, scratch=True),
        Mount(source=scratch / "tools", target="/build/tools", bind=True),
        Mount(source=scratch / "out", target="/build/out", writable=True, scratch=True),
    )
    inside = "/build/source" if source.path.is_dir() else f"/build/source/{source.path.name}"
    variables = {
        "SOURCE_DATE_EPOCH": FIRST_TIME,
        "PYTHONHASHSEED": "0",
        "MAX_JOBS": str(workers),
        "TORCH_CUDA_ARCH_LIST": ";".join(asked.capabilities or asked.target.capabilities),
        "FORCE_CUDA": "1" if _has_nvcc(asked.target) else "0",
    }
    return RunSpec(
        argv=("python", f"/build/tools/{BUILDER.name}", inside, "/build/out", "/build/tools", "/build/cuda"),
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


def _refuse_failed(asked: CompileAsk, done: Completed) -> None:
    """Raises BuildError with the first error of a compiler that failed, and the last words of all."""
    message, hint = done.over
    if done.timed_out:
        message = f"the run was ended: it reached the limit time={asked.timeout:.0f}"
        hint = "`--limit time=...` with more, or time=none"
    if message:
        raise LimitError(f"{asked.source}: {message}", hint=hint)
    if done.returncode == 0:
        return
    said = what_failed(done.stdout + done.stderr)
    hint = "packages and Debian's libraries (system: in a recipe) that it needs must be in the target"
    if not _has_nvcc(asked.target):
        hint = f"PyPI has CUDA's compiler from CUDA 13 on, not of {asked.target.cuda}, if it is that"
    raise BuildError(f"{asked.source} does not compile in {asked.target.name}:\n{said}", hint=hint)


def _has_nvcc(target: Target) -> bool:
    major = target.cuda.partition(".")[0]
    return target.source == "pypi" and major.isdigit() and int(major) >= 13


def _take_source(access: Access, text: str, lock: Lock, folder: Path, most: int) -> _Source:
    if found := _GIT.fullmatch(text):
        clone = folder.with_name("clone")
        _clone(found["url"], found["commit"], clone, min(most, shutil.disk_usage(clone.parent).free // 2))
        copy_source(clone, folder, most)
        remove_tree(clone)
        return _Source(path=folder, told=text)
    if text.startswith(("git+", "http")):
        raise UsageError(
            f"{text} names no commit",
            hint="write git+https://HOST/REPOSITORY@ and the 40 digits of one",
        )
    path = Path(text)
    if text.startswith((".", "/")) or path.exists():
        if path.is_dir():
            content = copy_source(path.resolve(), folder, most)
            return _Source(path=folder, told=f"{path.resolve().name}/ sha256:{content}")
        if not path.is_file():
            raise UsageError(f"{path} does not exist", hint="name a folder, an archive or a package")
        copy, content = _copied(path.resolve(), folder, most)
        return _Source(path=copy, told=f"{path.name} sha256:{content}")
    try:
        requirement = Requirement(text)
    except InvalidRequirement as error:
        raise UsageError(f"{text!r} is no package: {error}", hint="write torch-scatter==2.1.2") from error
    index = package_index(access)
    name = canonicalize_name(requirement.name)
    file, version = choose_sdist(requirement, uv_locker(index).project(name, lock))
    fetched = fetch_sdist(index, file, access.settings.cache_path / "sdists")
    copy, content = _copied(fetched, folder, most)
    if content != file.sha256:
        raise DownloadError(f"{fetched} was changed in the cache", hint=f"rm {fetched}")
    return _Source(path=copy, told=f"{file.filename} sha256:{content}", name=name, version=str(version))


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
            f"{archive} cannot be copied: {error.strerror}", hint="--limit scratch=..."
        ) from error
    return copy, whole.hexdigest()


def _clone(url: str, commit: str, folder: Path, most: int) -> None:
    """The files of a commit, its submodules' too.

    Raises UsageError, also where that takes more than `most` bytes of the disk.
    """
    if shutil.which("git") is None:
        raise ToolError("git is not on this machine", hint="apt-get install git")
    folder.mkdir(parents=True)
    reserve = shutil.disk_usage(folder).free - most
    for argv in (
        ("init", "--quiet"),
        ("fetch", "--quiet", "--depth", "1", url, commit),
        ("checkout", "--quiet", "FETCH_HEAD"),
        ("submodule", "--quiet", "update", "--init", "--recursive", "--depth", "1"),
    ):
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
                            f"{url} at {commit[:12]} has more than the {most:,} bytes that are free for it",
                            hint="free some space in the store, or name another",
                        )
                    with suppress(subprocess.TimeoutExpired):
                        process.wait(timeout=LOOK_AGAIN)
            finally:
                if process.poll() is None:
                    process.kill()
                    process.wait()
            said.seek(max(0, said.seek(0, os.SEEK_END) - 300))
            if process.returncode:
                words = printable(said.read().decode(errors="replace").strip())
                raise UsageError(f"git cannot have {url} at {commit[:12]}: {words}")


def _tools(
    access: Access, target: Target, lock: Lock, requires: Iterable[str], progress: Progress
) -> dict[LockedWheel, Path]:
    """What it is built with and the image has not, in the cache."""
    there = {package.name for package in lock.packages}
    wanted = {one for one in (*OWN_TOOLS, *requires) if canonicalize_name(Requirement(one).name) not in there}
    runtime = next((package.version for package in lock.wheels if package.name == "nvidia-cuda-runtime"), "")
    bounds = tuple(f"{name}=={'.'.join(runtime.split('.')[:2])}.*" for name in NVCC) if runtime else ()
    index = package_index(access)
    locker = uv_locker(index)
    question = WheelQuestion(
        lock=Lock(
            target=f"the tools of {target.name}",
            content_hash="",
            python=lock.python,
            platform=lock.platform,
            solver="",
            wheels=(),
        ),
        requirements=(*sorted(wanted), *(NVCC[:1] if runtime and _has_nvcc(target) else ())),
        # What the image has is taken in its version: the libraries' headers must be those of the compiler.
        constraints=(*bounds, *(f"{wheel.name}=={wheel.version}" for wheel in lock.wheels)),
    )
    wheels = locker.wheels(question, locker.solve(question), progress)
    cache = PackageCache(access.settings.cache_path, index)
    return cache.fetch(
        wheels, lambda missing: locker.addresses(replace(question.lock, wheels=missing)), progress
    )


def _lay_tools(wheels: Mapping[LockedWheel, Path], folder: Path, most: int) -> None:
    """Unpacks wheels, each held to its locked hash: packages to `site`, programs to `bin`."""
    (folder / "bin").mkdir(parents=True)
    left = most
    try:
        for wheel, path in wheels.items():
            left -= unpack_wheel(path, folder, sha256=wheel.sha256, most=left)
    except OSError as error:
        raise BuildError(
            f"a build tool cannot be unpacked: {error}", hint="see what the error says"
        ) from error
    shutil.copyfile(BUILDER, folder / BUILDER.name)


def _record(
    asked: CompileAsk, source: _Source, image: Image, tools: dict[LockedWheel, Path]
) -> dict[str, object]:
    return {
        "source": source.told,
        "target": asked.target.name,
        "image": image.manifest,
        "capabilities": list(asked.capabilities or asked.target.capabilities),
        "tools": [f"{wheel.filename} sha256:{wheel.sha256}" for wheel in tools],
        "builder": f"imagefactory {__version__}",
    }


def _made_before(folder: Path, record: dict[str, object]) -> Path | None:
    """The wheel of an equal record; the folder may have come with an untrusted project."""
    try:
        names = list_names(folder.resolve(), MOST_NAMES)
    except OSError:
        return None
    for name in (name.removesuffix(".json") for name in names if name.endswith(".whl.json")):
        try:
            held: Any = parse_json(read_file(folder, f"{name}.json", LONGEST_RECORD))
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
