"""The frozen values that stages hand on: Recipe -> Target -> Lock -> Definition -> Image -> Report.

Nothing here touches a disk, a clock or a network. Digests are strings `sha256:<64 hex>`;
sizes are bytes; versions are strings, never numbers.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

from imagefactory.serialize import LARGEST_NUMBER, Name, NumberRange, PairsAsObject


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceLocation:
    """A place in a recipe file. Lines and columns count from 1."""

    file: str
    line: int
    column: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}:{self.column}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ContainerStart:
    """How a container of an image starts, in OCI's terms; what is empty is the image's default.

    `user` is `UID` or `UID:GID`, `workdir` an absolute path.
    """

    entrypoint: tuple[str, ...] = ()
    command: tuple[str, ...] = ()
    workdir: str = ""
    user: str = ""


PLAIN_START = ContainerStart(command=("python",), workdir="/")
"""Of an image whose recipe says nothing of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FilesSpec:
    """Own files for images: `pattern`, a glob or folder from the factory's root on, to `folder` inside."""

    folder: str
    pattern: str
    where: SourceLocation


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnFile:
    """One of them: its absolute `path` inside, and its `source` on this machine with its 64 hex digits."""

    path: str
    source: Path
    sha256: str
    size: int
    executable: bool


NO_CUDA = "none"
"""The `cuda` of what computes on CPUs alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentValues:
    """What a row of a recipe and its targets both have.

    `framework` is the distribution's name in the source. `capabilities` are empty for CPUs. `constraints` are
    PEP 508 strings, or conda match specs where the source is `conda`. `waive` are checks of the GPU suite
    that need not run for the image to be verified; none may fail.

    `origins` are (normalised name, name of an index or path of a wheel) of packages that do not come from the
    machine's own package index, sorted. Paths begin with `./` at the project's root. `exclude` are normalised
    names of PyPI packages that are not installed although another package requires them.

    Of conda: `channels` are addresses in their order, `priority` is `strict` or `disabled`, `virtual` are
    properties of the machine that packages may rely on, `pip` are PEP 508 strings of what comes from PyPI.
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

    def shared(self) -> dict[str, Any]:
        """Return these values by name, to copy them between a row and a target."""
        return {field.name: getattr(self, field.name) for field in fields(EnvironmentValues)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Target(EnvironmentValues):
    """One image to build: `pytorch-2.3-cu121`.

    `cuda` is `12.1`, `12` where the framework binds only the major version, `rocm7` (gpu/builds.py) for AMD
    GPUs, or NO_CUDA. `requirements` are like `constraints`, the framework's own first. `virtual` are conda's
    virtual packages, sorted (`("__cuda", "12.1"), ("__glibc", "2.36")`). A `pypi` target has channels only
    if its base has no fitting Python, which then comes from conda.

    `on` names the target that this one adds packages to, empty for none. It has the source and requirements
    of that target and keeps every package of its lock. `sources` are folders (`./src/lab`) and repositories
    (`git+https://...@COMMIT`) that have no wheel yet: a target with some has no lock.
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

    @property
    def gpu(self) -> bool:
        """Whether it is for GPUs."""
        return self.cuda != NO_CUDA

    @property
    def conda(self) -> bool:
        """Whether it has conda packages."""
        return bool(self.channels)


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseSpec:
    """A base image: made from Debian's packages, or pulled by digest where `image` is not empty.

    `python` is the version of Python it carries (`3.11`), empty where it carries none or nothing is known of
    it (conda's environments bring theirs), `glibc` its C library (`2.36`): facts that decide which wheels
    fit. `public` is the nearest public image for builds by hand. A pulled base has no `suite` and no
    `packages`; its `image` is `host/repository[:tag]@sha256:...`, and its `public` the same without the tag.
    `interpreter` is the absolute path of its Python, empty for Debian's own place. `on` names the base that
    this one adds packages to, which `packages` holds too; empty for none. `platform` is what it is for.
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
        """Absolute path of its Python."""
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
    """The packages of a base, sorted by name, and the one clock its files carry (seconds since 1970)."""

    base: str
    suite: str
    content_hash: str
    source_date_epoch: int
    packages: tuple[DebianPackage, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LockedWheel:
    """One package of an environment: the very wheel file that will be in the image.

    `name` is normalised (PEP 503), `sha256` 64 hex digits, `size` bytes.
    """

    name: str
    version: str
    filename: str
    sha256: str
    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LockedCondaPackage:
    """One conda package: the very archive that will be unpacked, as its channel's records describe it.

    `url` is its address in its channel and part of what it is, whatever mirror it comes from; `filename`
    is that address' last part. `build` is conda's build string (`py3.11_cuda12.1_cudnn8.9.2_0`), `subdir`
    `linux-64` or `noarch`. `sha256` and `md5` are hex (`md5` empty where the channel has none), `size`
    bytes. `depends` are match specs, virtual packages among them.
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
class Lock:
    """A solved environment, each kind of package sorted by name.

    `content_hash` is the hash of all that decided it (`sha256:...`): while it equals the target's,
    nothing is solved again. `solver` names what solved it (`uv 0.9.1`, `py-rattler 0.28.0, uv 0.9.1`).
    `python` is the minor version (`3.11`), of the base's Python or of the `python` among `conda`.

    `conda` is empty for a lock of wheels alone; then so are `channels` (addresses in their order) and
    `virtual` (the virtual packages it was solved with, as a target has them). No package stands in both
    `wheels` and `conda`. `note` is a line of whoever locked it, `origins` says of wheels what a target's do.
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

    @property
    def packages(self) -> tuple[LockedPackage, ...]:
        """Conda's packages, then the wheels on top of them."""
        return (*self.conda, *self.wheels)


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildSpec:
    """All that an engine needs to make a target's image, and nothing it could choose.

    `prefix` is the environment inside the image: a virtual one on the base's Python, or conda's with its
    own. `environment` holds at build and at run, `labels` are OCI annotations; both in their written order.
    `under` are the locks of the targets that this one is built on, the lowest first: `lock` holds all of
    their packages too, and their layers are made as for those targets. `files` are own files, sorted by
    path, and `start` how a container starts, whole but for what is left to the engine. `local` are the wheels
    that lie in the factory, each with its file name for a path. `named_below` are, for each of `under`, the
    packages from PyPI that its recipe names; empty where that is not known.
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
        """Absolute path of the Python that the environment's packages are for and compiled by."""
        return f"{self.prefix}/bin/python{self.target.python}" if self.lock.conda else self.base.python_path

    @property
    def site_packages(self) -> str:
        """Absolute path of the environment's packages inside the image."""
        return f"{self.prefix}/lib/python{self.target.python}/site-packages"


@dataclass(frozen=True, slots=True, kw_only=True)
class Mount:
    """A folder or file of the host shown inside the image.

    The unshare runner shows what is not `writable` through an overlay, in which no socket answers, unless it
    is to `bind` it as it is. With `scratch` it counts what is in it towards the run's limit on scratch.
    """

    source: Path
    target: str
    writable: bool = False
    bind: bool = False
    scratch: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSpec:
    """One command inside an image.

    `environment` is added to the image's own; nothing of the host's comes in. `timeout` is seconds,
    None for no limit. `limits` are asked for by name (runtime/limits.py), None to lift one; the others are
    the runner's. `capture` collects stdout and stderr; without it they are the caller's.
    """

    argv: tuple[str, ...]
    environment: tuple[tuple[str, str], ...] = ()
    workdir: str = "/"
    uid: int = 0
    read_only: bool = False
    network: bool = False
    gpus: bool = False
    mounts: tuple[Mount, ...] = ()
    timeout: float | None = None
    limits: tuple[tuple[str, int | None], ...] = ()
    capture: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandResult:
    """How a command ended. `returncode` is 128 + N for signal N; output is empty when not captured.

    `over` says which limit ended it and what to do, both empty where none did.
    """

    returncode: int
    stdout: str
    stderr: str
    seconds: float
    timed_out: bool = False
    over: tuple[str, str] = ("", "")


class Outcome(StrEnum):
    """The words of the tables, one meaning each. `together` and `apart` speak of several GPUs at once."""

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
    """One check of the suite: `detail` is one line for a person, `numbers` what was measured."""

    name: Name
    state: CheckState
    detail: str
    seconds: Annotated[float, NumberRange(0, LARGEST_NUMBER)]
    numbers: Annotated[tuple[tuple[str, float], ...], PairsAsObject()] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What the CPU-level smoke test said of one image.

    `passed` speaks of the CPU-level checks alone; `gpu` is `not-tested`: a smoke test never changes it.
    `failure` is None or the word for why not (`load-failed`, `wrong-numbers`, `timeout`, `infrastructure`).
    `hint` is what to write in the recipe, empty where nothing is known.
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
