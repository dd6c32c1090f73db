"""Targets, bases, locks and what they hold, with what no test looks at filled in."""

from __future__ import annotations

import hashlib
from dataclasses import replace

from imagefactory.model import BaseSpec, Lock, LockedCondaPackage, LockedWheel, SourceLocation, Target

FORGE = "https://conda.anaconda.org/conda-forge"
WHERE = SourceLocation(file="recipes/pytorch.yaml", line=7, column=5)


def make_target(**changes: object) -> Target:
    target = Target(
        name="pytorch-2.3-cu121",
        family="pytorch",
        description="PyTorch with CUDA libraries",
        source="pypi",
        framework="torch",
        version="2.3",
        cuda="12.1",
        python="3.11",
        base="debian-12",
        platform="linux/amd64",
        capabilities=("8.0",),
        checks=("packages",),
        requirements=("torch==2.3.*",),
        constraints=(),
        environment=(("OMP_PLACES", "cores"),),
        where=WHERE,
    )
    return replace(target, **changes)  # type: ignore[arg-type]


def make_base(**changes: object) -> BaseSpec:
    base = BaseSpec(
        name="debian-12",
        suite="bookworm",
        python="3.11",
        glibc="2.36",
        packages=("python3", "gcc", "python3-venv"),
        public="docker.io/library/debian:12-slim",
        where=WHERE,
    )
    return replace(base, **changes)  # type: ignore[arg-type]


def make_lock(**changes: object) -> Lock:
    wheels = (
        LockedWheel(
            name="idna", version="3.7", filename="idna-3.7-py3-none-any.whl", sha256="2" * 64, size=66_836
        ),
        LockedWheel(
            name="torch",
            version="2.3.1",
            filename="torch-2.3.1-cp311-cp311-manylinux1_x86_64.whl",
            sha256="1" * 64,
            size=779_000_000,
        ),
    )
    lock = Lock(
        target="pytorch-2.3-cu121",
        content_hash="sha256:" + "0" * 64,
        python="3.11",
        platform="manylinux_2_36_x86_64",
        solver="uv 0.9.1",
        wheels=wheels,
    )
    return replace(lock, **changes)  # type: ignore[arg-type]


def hexed(text: str, kind: str = "sha256") -> str:
    return hashlib.new(kind, text.encode()).hexdigest()


def make_conda(
    spec: str, *depends: str, channel: str = FORGE, subdir: str = "linux-64", **changes: object
) -> LockedCondaPackage:
    """`make_conda("python 3.11.9 h1_0", "openssl >=3")`."""
    name, version, build = spec.split()
    filename = f"{name}-{version}-{build}.conda"
    package = LockedCondaPackage(
        name=name,
        version=version,
        build=build,
        subdir=subdir,
        url=f"{channel}/{subdir}/{filename}",
        filename=filename,
        sha256=hexed(filename),
        md5=hexed(filename, "md5"),
        size=1000 + len(filename),
        depends=depends,
    )
    return replace(package, **changes)  # type: ignore[arg-type]
