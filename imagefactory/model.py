"""Values that the stages pass on: Target -> Lock -> BuildSpec -> Image -> Report.

This module uses no disk, clock or network. Digests are strings `sha256:<64 hex>`, sizes are bytes, and
versions are strings, never numbers.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from datetime import datetime
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

from imagefactory.serialize import LARGEST_NUMBER, Name, NumberRange, PairsAsObject


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceLocation:
    """A location in a recipe file. Lines and columns count from 1."""

    file: str
    line: int
    column: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}:{self.column}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ContainerStart:
    """How a container of an image starts, in OCI terms. Empty fields use the image's default.

    `user` is `UID` or `UID:GID`, `workdir` an absolute path.
    """

    entrypoint: tuple[str, ...] = ()
    command: tuple[str, ...] = ()
    workdir: str = ""
    user: str = ""


PLAIN_START = ContainerStart(command=("python",), workdir="/")
"""The start of an image whose recipe sets none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FilesSpec:
    """Files of the project for images: `pattern`, a glob or directory from the root, to `folder` inside."""

    folder: str
    pattern: str
    where: SourceLocation


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnFile:
    """A file of the project: its absolute `path` in the image, its `source` here and its 64 hex digits."""

    path: str
    source: Path
    sha256: str
    size: int
    executable: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class FrozenSpec:
    """The lock file of another tool whose very files a target has, so that nothing is solved.

    `file` is its path below the project's root (`./uv.lock`). `environment`, `extras` and `groups` select
    its parts. `skip` are normalized names of packages that the image omits. `sha256` is that of the file,
    empty if it is missing.
    """

    file: str
    where: SourceLocation
    environment: str = ""
    extras: tuple[str, ...] = ()
    groups: tuple[str, ...] = ()
    skip: tuple[str, ...] = ()
    sha256: str = ""


NO_CUDA = "none"
"""The `cuda` of targets only for CPUs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentValues:
    """The values that a recipe row shares with its targets.

    `framework` is the distribution's name in the source. `capabilities` are empty for CPUs. `constraints` are
    PEP 508 strings, or conda match specs if the source is `conda`. `waive` lists checks of the GPU suite that
    may be skipped in a verified image; none may fail.

    `origins` are sorted pairs: a normalized name, and the index or wheel path it comes from. They list
    packages from other places than the machine's own index. Paths begin with `./` at the project's root.
    `exclude` are normalized names of PyPI packages that are not installed although another package requires
    them. `cooldown` is the least age of a release to lock (`7 days except numpy`), empty for any age.

    For conda: `channels` are addresses in their order, `priority` is `strict` or `disabled`, `virtual` are
    properties of the machine that packages may rely on, `pip` are PEP 508 strings of packages from PyPI.
    """

    where: SourceLocation
    framework: str = ""
    version: str = ""
    python: str = ""
    base: str = ""
    description: str = ""
    labels: tuple[tuple[str, str], ...] = ()
    capabilities: tuple[str, ...] = ()
    checks: tuple[str, ...] = ()
    waive: tuple[str, ...] = ()
    constraints: tuple[str, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()
    channels: tuple[str, ...] = ()
    priority: str = "strict"
    virtual: tuple[tuple[str, str], ...] = ()
    pip: tuple[str, ...] = ()
    origins: tuple[tuple[str, str], ...] = ()
    exclude: tuple[str, ...] = ()
    cooldown: str = ""

    def shared(self) -> dict[str, Any]:
        """Return these values by name, to copy them between a row and a target."""
        return {field.name: getattr(self, field.name) for field in fields(EnvironmentValues)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Target(EnvironmentValues):
    """One image to build: `pytorch-2.3-cu121`.

    `cuda` is `12.1`, `12` if the framework binds only the major version, `rocm7` (gpu/values.py) for AMD
    GPUs, or NO_CUDA. `requirements` are like `constraints`, the framework's own first. `virtual` are sorted
    virtual packages of conda (`("__cuda", "12.1"), ("__glibc", "2.36")`). A `pypi` target has channels only
    if its base has no fitting Python, which then comes from conda.

    `on` names the parent target, which this one adds packages to; empty for none. A target has its parent's
    source and requirements, and keeps every package of its lock. `sources` are directories (`./src/lab`) and
    repositories (`git+https://...@COMMIT`) without a wheel. A target with sources has no lock.
    With `frozen` the packages are the files of another tool's lock.
    """

    name: str
    family: str
    source: str
    cuda: str
    platform: str
    requirements: tuple[str, ...]
    on: str = ""
    files: tuple[FilesSpec, ...] = ()
    start: ContainerStart = ContainerStart()
    sources: tuple[str, ...] = ()
    frozen: FrozenSpec | None = None

    @property
    def gpu(self) -> bool:
        """Whether the target is for GPUs."""
        return self.cuda != NO_CUDA

    @property
    def conda(self) -> bool:
        """Whether the target has conda packages."""
        return bool(self.channels)


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseSpec:
    """A base image: built from Debian packages, or pulled by digest if `image` is set.

    `python` (`3.11`) and `glibc` (`2.36`) are versions in the base that decide which wheels fit. `python` is
    empty if the base has none or it is unknown; conda environments bring their own. `public` is the nearest
    public image for manual builds. A pulled base has no `suite` and no `packages`; its `image` is
    `host/repository[:tag]@sha256:...`, and `public` the same without the tag. `interpreter` is the absolute
    path of its Python, empty for Debian's. `on` names the parent base, empty for none; `packages` includes
    the parent's. `platform` is the image's platform.
    """

    name: str
    suite: str
    python: str
    glibc: str
    packages: tuple[str, ...]
    public: str
    where: SourceLocation
    image: str = ""
    interpreter: str = ""
    on: str = ""
    platform: str = "linux/amd64"

    @property
    def python_path(self) -> str:
        """Absolute path of the base's Python."""
        return self.interpreter or f"/usr/bin/python{self.python or 3}"


@dataclass(frozen=True, slots=True, kw_only=True)
class DebianPackage:
    """One .deb of a base. `sha256` is 64 hex digits, `size` bytes of the file."""

    name: str
    version: str
    architecture: str
    sha256: str
    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseLock:
    """The packages of a base, sorted by name, and the timestamp of its files (seconds since 1970)."""

    base: str
    suite: str
    content_hash: str
    source_date_epoch: int
    packages: tuple[DebianPackage, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LockedWheel:
    """One package of an environment: the exact wheel file in the image.

    `name` is normalized (PEP 503), `sha256` 64 hex digits, `size` bytes.
    """

    name: str
    version: str
    filename: str
    sha256: str
    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LockedCondaPackage:
    """One conda package: the exact archive to unpack, as its channel's records describe it.

    `url` is its address in its channel, the same for all mirrors; `filename` is its last part. `build` is
    conda's build string (`py3.11_cuda12.1_cudnn8.9.2_0`), `subdir` is `linux-64` or `noarch`. `sha256` and
    `md5` are hex (`md5` is empty if the channel has none), `size` is bytes. `depends` are match specs, also
    of virtual packages.
    """

    name: str
    version: str
    build: str
    subdir: str
    url: str
    filename: str
    sha256: str
    md5: str
    size: int
    depends: tuple[str, ...]


LockedPackage = LockedWheel | LockedCondaPackage


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleaseCutoff:
    """No release after `time` (UTC, whole seconds) is locked, except packages in `allowed` (normalized)."""

    time: datetime
    allowed: tuple[str, ...] = ()

    def __str__(self) -> str:
        names = f" except {', '.join(self.allowed)}" if self.allowed else ""
        return f"{self.time:%Y-%m-%dT%H:%M:%SZ}{names}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Lock:
    """A solved environment, each type of package sorted by name.

    `content_hash` is the hash of all inputs (`sha256:...`): while it equals the target's, nothing is solved
    again. `solver` names the tools (`uv 0.9.1`, `py-rattler 0.28.0, uv 0.9.1`). `python` is the minor version
    (`3.11`), of the base's Python or of the `python` in `conda`.

    `conda` is empty for a lock of only wheels; then so are `channels` (addresses in their order) and
    `virtual` (the virtual packages used for solving, as in a target). No package is in both `wheels` and
    `conda`. `note` is a line by the person who locked; `origins` are those of the wheels, as in a target.
    `cutoff` limited the releases when the lock was solved, None without a limit. `publishers` are those of
    the wheels that the index attests, by name (`GitHub numpy/numpy release.yml`).
    """

    target: str
    content_hash: str
    python: str
    platform: str
    solver: str
    wheels: tuple[LockedWheel, ...]
    conda: tuple[LockedCondaPackage, ...] = ()
    channels: tuple[str, ...] = ()
    virtual: tuple[tuple[str, str], ...] = ()
    note: str = ""
    origins: tuple[tuple[str, str], ...] = ()
    cutoff: ReleaseCutoff | None = None
    publishers: tuple[tuple[str, str], ...] = ()

    @property
    def packages(self) -> tuple[LockedPackage, ...]:
        """The conda packages, then the wheels on top of them."""
        return (*self.conda, *self.wheels)


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildSpec:
    """All inputs of an engine for a target's image; it leaves no choice.

    `prefix` is the environment inside the image: a virtual one on the base's Python, or a conda one with its
    own. `environment` applies at build and at run, `labels` are OCI annotations; both in their written order.
    `under` are the locks of the parent targets, the lowest first. `lock` includes all of their packages,
    whose layers are the parents'. `files` are project files, sorted by path. `start` is how a container
    starts; the engine completes it. `local` are the wheels in the project, each with its file name as its
    path. `named_below` are, for each of `under`, the PyPI packages that its recipe names; empty if unknown.
    """

    target: Target
    base: BaseSpec
    lock: Lock
    prefix: str
    environment: tuple[tuple[str, str], ...]
    labels: tuple[tuple[str, str], ...]
    under: tuple[Lock, ...] = ()
    files: tuple[OwnFile, ...] = ()
    start: ContainerStart = PLAIN_START
    local: tuple[OwnFile, ...] = ()
    named_below: tuple[frozenset[str], ...] = ()

    @property
    def python_path(self) -> str:
        """Absolute path of the Python that the environment's packages are for."""
        return f"{self.prefix}/bin/python{self.target.python}" if self.lock.conda else self.base.python_path

    @property
    def site_packages(self) -> str:
        """Absolute path of the environment's packages inside the image."""
        return f"{self.prefix}/lib/python{self.target.python}/site-packages"


@dataclass(frozen=True, slots=True, kw_only=True)
class Mount:
    """A directory or file of the host that a container sees.

    The unshare runner mounts it through an overlay, in which no socket answers, unless `writable` or `bind`
    is set. With `scratch` its content counts towards the run's limit on scratch.
    """

    source: Path
    target: str
    writable: bool = False
    bind: bool = False
    scratch: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSpec:
    """One command inside an image.

    `environment` is added to the image's own; no variable of the host is passed on. `timeout` is seconds,
    None for no limit. `selected_gpus` are number, UUID and device of each GPU (hardware.SelectedGpu), none
    for all; a variable in `environment` selects them too. `limits` sets limits by name (runtime/limits.py),
    None removes one; the others are the runner's. `capture` collects stdout and stderr; without it they are
    the caller's.
    """

    argv: tuple[str, ...]
    environment: tuple[tuple[str, str], ...] = ()
    workdir: str = "/"
    uid: int = 0
    read_only: bool = False
    network: bool = False
    gpus: bool = False
    selected_gpus: tuple[tuple[int, str, str], ...] = ()
    mounts: tuple[Mount, ...] = ()
    timeout: float | None = None
    limits: tuple[tuple[str, int | None], ...] = ()
    capture: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandResult:
    """The end of a command. `returncode` is 128 + N for signal N. Output is empty if not captured.

    `over` are the limit that ended it and the fix, both empty for none.
    """

    returncode: int
    stdout: str
    stderr: str
    seconds: float
    timed_out: bool = False
    over: tuple[str, str] = ("", "")


class Outcome(StrEnum):
    """The outcomes in tables. `together` and `apart` are for several GPUs used at once."""

    VERIFIED = "verified"
    TOGETHER = "together"
    APART = "apart"
    WRONG_NUMBERS = "wrong-numbers"
    NO_KERNEL = "no-kernel"
    DRIVER_TOO_OLD = "driver-too-old"
    NO_GPU = "no-gpu"
    WRONG_GPU = "wrong-gpu"
    LOAD_FAILED = "load-failed"
    PULL_FAILED = "pull-failed"
    TIMEOUT = "timeout"
    HELD = "held"
    NO_MATCH = "no-match"
    INFRASTRUCTURE = "infrastructure"
    UNSOLVABLE = "unsolvable"
    BUILD_FAILED = "build-failed"
    NOT_TESTED = "not-tested"


class CheckState(StrEnum):
    PASSED = "passed"
    FAILED = "failed"
    NOT_APPLICABLE = "not-applicable"
    NOT_RUN = "not-run"


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckResult:
    """One check of the suite: `detail` is one line for people, `numbers` are the measured values."""

    name: Name
    state: CheckState
    detail: str
    seconds: Annotated[float, NumberRange(0, LARGEST_NUMBER)]
    numbers: Annotated[tuple[tuple[str, float], ...], PairsAsObject()] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The result of the CPU-level smoke test of one image.

    `passed` is about the CPU-level checks only; `gpu` is `not-tested`: a smoke test never changes it.
    `failure` is None or the reason (`load-failed`, `wrong-numbers`, `timeout`, `infrastructure`).
    `hint` is what to write in the recipe, empty if nothing is known.
    """

    target: str
    image: str
    config: str
    suite: str
    passed: bool
    failure: Outcome | None
    gpu: Outcome
    checks: tuple[CheckResult, ...]
    from_record: bool
    hint: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageProgress:
    """The status of a target's image in the store, `verified` on these capabilities."""

    built: bool = False
    pushed: bool = False
    verified: tuple[str, ...] = ()
