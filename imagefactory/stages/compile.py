"""A wheel of a package that has none: compiled once, in the image that it is for, without network.

source, tools -> the image's Python compiles -> a wheel, and a record of all that made it
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import stat
import subprocess
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from imagefactory import __version__
from imagefactory.access import Access, package_index, uv_locker
from imagefactory.errors import BuildError, ToolError, UsageError
from imagefactory.factory import Factory
from imagefactory.files import folder_for_a_while, replace_text
from imagefactory.gpu.builds import rocm_of
from imagefactory.lock.download import PackageCache
from imagefactory.lock.pypi.local import digest
from imagefactory.lock.pypi.question import WheelQuestion
from imagefactory.lock.pypi.sdist import build_requires, choose_sdist, fetch_sdist
from imagefactory.model import Completed, Lock, LockedWheel, Mount, RunSpec, Target
from imagefactory.oci.model import Image
from imagefactory.progress import Progress
from imagefactory.stages.locked import require_lock
from imagefactory.stages.runner import make_runner
from imagefactory.stages.stored import stored_image

BUILDER = Path(__file__).parents[1] / "engines" / "wheel_builder.py"
OWN_TOOLS = ("pip", "setuptools", "wheel", "ninja", "packaging")
NVCC = ("nvidia-cuda-nvcc", "nvidia-cuda-crt", "nvidia-nvvm")
"""From CUDA 13 on NVIDIA's wheels hold the whole compiler; those before hold its last step alone."""
_GIT = re.compile(r"git\+(?P<url>(https|ssh|file)://[^@#\s]+)@(?P<commit>[0-9a-f]{40})")
FIRST_TIME = "315532800"
"""1980, the first time that a wheel can say of its files."""
_TAIL, _LAST = 30, 10
_ERROR = re.compile(r":\d+: (fatal )?error: |\(\d+\): (catastrophic )?error|nvcc fatal|ld: (?!warning)")
"""How gcc, nvcc and ld tell of what stops them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileAsk:
    """What to compile for which target, and the folder that gets it.

    `source` is a requirement, a folder, an archive or `git+URL@COMMIT`. `capabilities` (`8.0`) are those to
    compile for, empty for the target's.
    """

    source: str
    target: Target
    folder: Path
    capabilities: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Compiled:
    """The wheel; `made` is false where it was there, of the same source, image and tools."""

    wheel: Path
    made: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class _Source:
    """`path` is an archive or a folder, copied; `told` names it and its content."""

    path: Path
    told: str


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
    layout.tmp.mkdir(parents=True, exist_ok=True)
    with layout.in_use(progress), folder_for_a_while("compile-", layout.tmp) as scratch:
        source = _take_source(factory, asked.source, lock, scratch / "source")
        tools = _tools(factory, target, lock, build_requires(source.path), progress)
        record = _record(asked, source, image, tools)
        if there := _made_before(asked.folder, record):
            return Compiled(wheel=there, made=False)
        _lay_tools(tools.values(), scratch / "tools")
        shutil.copyfile(BUILDER, scratch / "tools" / BUILDER.name)
        (scratch / "out").mkdir()
        runner.prepare(image, checked=False)
        spec = _spec(asked, source, scratch, factory.settings.worker_count)
        with progress.stage(f"{asked.source}: compile in {target.name}"):
            _refuse_failed(asked, runner.run(image, spec))
        wheels = list((scratch / "out").glob("*.whl"))
        if len(wheels) != 1:
            raise BuildError(f"{asked.source}: compiling left {len(wheels)} wheels")
        asked.folder.mkdir(parents=True, exist_ok=True)
        wheel = asked.folder / wheels[0].name
        shutil.move(wheels[0], wheel)
        replace_text(_record_path(wheel), json.dumps({**record, "sha256": digest(wheel)}, indent=2) + "\n")
    return Compiled(wheel=wheel, made=True)


def _spec(asked: CompileAsk, source: _Source, scratch: Path, workers: int) -> RunSpec:
    mounts = (
        Mount(source=scratch / "source", target="/build/source", writable=True),
        Mount(source=scratch / "tools", target="/build/tools", bind=True),
        Mount(source=scratch / "out", target="/build/out", writable=True),
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
        limits=(("memory", None), ("scratch", None)),
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


def _take_source(access: Access, text: str, lock: Lock, folder: Path) -> _Source:
    if found := _GIT.fullmatch(text):
        _clone(found["url"], found["commit"], folder)
        return _Source(path=folder, told=text)
    if text.startswith(("git+", "http")):
        raise UsageError(
            f"{text} names no commit",
            hint="write git+https://HOST/REPOSITORY@ and the 40 digits of one",
        )
    path = Path(text)
    if text.startswith((".", "/")) or path.exists():
        if path.is_dir():
            shutil.copytree(path, folder, ignore=shutil.ignore_patterns(".git", "build", "*.egg-info"))
            return _Source(path=folder, told=f"{path.resolve().name}/ sha256:{_sha256_of_tree(folder)}")
        if not path.is_file():
            raise UsageError(f"{path} does not exist", hint="name a folder, an archive or a package")
        return _Source(path=_copied(path, folder), told=f"{path.name} sha256:{digest(path)}")
    try:
        requirement = Requirement(text)
    except InvalidRequirement as error:
        raise UsageError(f"{text!r} is no package: {error}", hint="write torch-scatter==2.1.2") from error
    index = package_index(access)
    file, _ = choose_sdist(requirement, uv_locker(index).project(canonicalize_name(requirement.name), lock))
    fetched = fetch_sdist(index, file, access.settings.cache_path / "sdists")
    return _Source(path=_copied(fetched, folder), told=f"{file.filename} sha256:{file.sha256}")


def _copied(archive: Path, folder: Path) -> Path:
    """An archive alone in its folder: what lies beside it is not shown to whom it brings."""
    folder.mkdir()
    return Path(shutil.copy(archive, folder))


def _clone(url: str, commit: str, folder: Path) -> None:
    """The files of a commit, its submodules' too; git's own folder is left out."""
    if shutil.which("git") is None:
        raise ToolError("git is not on this machine", hint="apt-get install git")
    folder.mkdir(parents=True)
    for argv in (
        ("init", "--quiet"),
        ("fetch", "--quiet", "--depth", "1", url, commit),
        ("checkout", "--quiet", "FETCH_HEAD"),
        ("submodule", "--quiet", "update", "--init", "--recursive", "--depth", "1"),
    ):
        done = subprocess.run(
            ["git", "-C", str(folder), *argv], capture_output=True, text=True, stdin=subprocess.DEVNULL
        )
        if done.returncode:
            raise UsageError(f"git cannot have {url} at {commit[:12]}: {done.stderr.strip()[-300:]}")


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


def _lay_tools(wheels: Iterable[Path], folder: Path) -> None:
    """Unpacks wheels: packages to `site`, programs to `bin`."""
    (folder / "bin").mkdir(parents=True)
    for path in wheels:
        with zipfile.ZipFile(path) as archive:
            for info in archive.infolist():
                parts = Path(info.filename).parts
                inside = folder / "site" / info.filename
                if len(parts) > 2 and parts[0].endswith(".data"):
                    if parts[1] not in ("scripts", "purelib", "platlib"):
                        continue
                    inside = folder / ("bin" if parts[1] == "scripts" else "site") / Path(*parts[2:])
                if info.is_dir() or not inside.resolve().is_relative_to(folder.resolve()):
                    continue
                inside.parent.mkdir(parents=True, exist_ok=True)
                with archive.open(info) as packed, inside.open("wb") as out:
                    shutil.copyfileobj(packed, out)
                if (info.external_attr >> 16) & stat.S_IXUSR or inside.parent.name == "bin":
                    inside.chmod(0o755)


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
    for path in sorted(folder.glob("*.whl.json")):
        try:
            held = json.loads(path.read_text(encoding="utf-8"))
            wheel = path.with_name(path.name.removesuffix(".json"))
            if {**record, "sha256": held["sha256"]} == held and digest(wheel) == held["sha256"]:
                return wheel
        except (OSError, ValueError, KeyError, TypeError):
            continue
    return None


def _record_path(wheel: Path) -> Path:
    return wheel.with_name(f"{wheel.name}.json")


def _sha256_of_tree(folder: Path) -> str:
    """Of all its files: their names, whether they may be executed, and their content."""
    whole = hashlib.sha256()
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        mode = bool(path.stat().st_mode & stat.S_IXUSR)
        whole.update(f"{path.relative_to(folder)} {mode} {digest(path)}\n".encode())
    return whole.hexdigest()
