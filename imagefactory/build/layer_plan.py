"""Assign packages to the layers of an image, and compute the keys of layers. No I/O."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from imagefactory.build.conda.prefix import LinkedPrefix, read_record
from imagefactory.build.wheel_layer import InstallPrefix
from imagefactory.errors import BuildError
from imagefactory.model import Lock, LockedCondaPackage, LockedPackage, LockedWheel
from imagefactory.oci.layers import codec
from imagefactory.oci.manifests import hash_key

OWN_LAYER_BYTES = 8_000_000
"""The least bytes of a package that gets its own layer. Smaller ones are not worth one."""
MOST_OWN_LAYERS = 48
"""The most packages with their own layer. Docker stops at 127 layers, and overlay mounts get slow earlier."""
BUCKETS = 8
"""The number of layers for the other packages, by hash of name. A changed package rebuilds one of them."""
MORE_OWN_LAYERS, MORE_BUCKETS = 12, 4
"""These limits for additions to a parent target, whose layers count as well."""
MOST_LAYERS = 110
"""The most layers of packages, including those of parents. Above it a target adds two. The base adds more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerInputs:
    """The common inputs of all layers of a build. Those that determine bytes are part of each layer's key.

    `interpreter` is the Python that compiles byte code, and `environment` the variables to start it.
    `compiler` names both: of the base, or conda's own. `linked` is the directory of a linked conda prefix,
    None for none, and `linker` names its linker. `processor` is that of the base's programs.
    """

    store: Path
    segments: Path
    codec: str
    place: InstallPrefix
    epoch: int
    compiler: str
    interpreter: str = ""
    environment: tuple[tuple[str, str], ...] = ()
    linked: Path | None = None
    linker: str = ""
    processor: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerPackage:
    """One package for a layer. `key` is the hash of all inputs of its segment.

    `path` is the wheel with its `sha256`, or the record in conda-meta of a linked conda package. `left_out`
    are paths of the wheel that another package owns in the image.
    """

    key: str
    path: Path
    size: int
    sha256: str = ""
    left_out: frozenset[str] = frozenset()

    def without(self, paths: frozenset[str]) -> LayerPackage:
        """Return the package without the paths that another package owns."""
        if not paths:
            return self
        return replace(self, key=hash_key("without", self.key, *sorted(paths)), left_out=paths)

    @property
    def linked(self) -> bool:
        return not self.sha256

    @property
    def name(self) -> str:
        """The name for messages."""
        return self.path.stem if self.linked else self.path.name


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerPlan:
    """A layer to build or to find, with its packages in order. `shared` layers have small packages."""

    key: str
    title: str
    parts: tuple[LayerPackage, ...]
    shared: bool

    @property
    def size(self) -> int:
        return sum(part.size for part in self.parts)


Group = Mapping[LockedPackage, LayerPackage]
"""Packages that are planned together: those of a target, or its additions to a parent."""


def plan_layers(groups: Sequence[Group]) -> tuple[LayerPlan, ...]:
    """Return the layers for groups of packages. The same packages give the same plan.

    The first group is planned without the others, then the first two, and so on. So a target's additions to
    its parent change no layer of the parent. Conda packages and wheels share no layer. Conda packages come
    first.
    """
    plans: list[LayerPlan] = []
    for number, group in enumerate(groups):
        most, buckets = (MORE_OWN_LAYERS, MORE_BUCKETS) if number else (MOST_OWN_LAYERS, BUCKETS)
        if len(plans) + most + 2 * buckets > MOST_LAYERS:
            most, buckets = 0, 1
        large = sorted(
            (package for package in group if package.size >= OWN_LAYER_BYTES), key=lambda p: (-p.size, p.name)
        )[:most]
        for kind in (LockedCondaPackage, LockedWheel):
            of_kind = [
                package for package in sorted(group, key=lambda p: p.name) if isinstance(package, kind)
            ]
            large_packages = [package for package in of_kind if package in large]
            shared: dict[int, list[LockedPackage]] = {}
            for package in of_kind:
                if package not in large_packages:
                    bucket = hashlib.sha256(package.name.encode()).digest()[0] % buckets
                    shared.setdefault(bucket, []).append(package)
            name = "conda bucket" if kind is LockedCondaPackage else "bucket"
            plans += [
                _plan(f"{package.name} {package.version}", [group[package]], shared=False)
                for package in large_packages
            ]
            plans += [
                _plan(f"{name} {bucket}", [group[package] for package in chosen], shared=True)
                for bucket, chosen in sorted(shared.items())
            ]
    return tuple(plans)


def _plan(title: str, parts: Iterable[LayerPackage], *, shared: bool) -> LayerPlan:
    parts = tuple(parts)
    key = hash_key("bucket" if shared else "layer", *(part.key for part in parts))
    return LayerPlan(key=key, title=title, parts=parts, shared=shared)


def wheel_part(wheel: LockedWheel, path: Path, bench: LayerInputs) -> LayerPackage:
    import installer

    key = hash_key(
        "wheel",
        wheel.filename,
        wheel.sha256,
        codec(bench.codec).identity,
        f"installer {installer.__version__}",
        bench.place.prefix,
        bench.place.python,
        bench.compiler,
        str(bench.epoch),
    )
    return LayerPackage(key=key, path=path, size=wheel.size, sha256=wheel.sha256)


def conda_part(package: LockedCondaPackage, prefix: LinkedPrefix, bench: LayerInputs) -> LayerPackage:
    """Return a linked conda package. A library without Python code is the same for every Python."""
    record = read_record(prefix.record(package))
    key = hash_key(
        "conda",
        package.url,
        package.sha256,
        codec(bench.codec).identity,
        bench.linker,
        bench.place.prefix,
        bench.place.python if package.subdir == "noarch" else "",
        bench.compiler if record.sources(bench.place) else "",
        str(bench.epoch),
        # Without claimed paths, and without byte code whose source is in another package.
        hashlib.sha256(record.data).hexdigest(),
    )
    return LayerPackage(key=key, path=record.path, size=package.size)


def in_build_order(plans: Iterable[LayerPlan]) -> list[LayerPlan]:
    """Return shared layers first, then the largest. The last layers are small, so threads finish together.

    The bytes of a shared layer do not predict its time, because its packages are Python code to compile.
    """
    return sorted(plans, key=lambda plan: (not plan.shared, -plan.size, plan.key))


def conda_python(lock: Lock) -> str:
    """Return the name of a conda environment's Python, whose archive determines the byte code."""
    for package in lock.conda:
        if package.name == "python":
            return f"conda python {package.sha256}"
    raise BuildError(
        "lock-without-python",
        f"the lock of {lock.target} has no python",
        hint=f"run imagefactory lock {lock.target}",
    )
