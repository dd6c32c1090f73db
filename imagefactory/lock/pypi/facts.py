"""Check that a lock of wheels has the framework and the one CUDA of its target."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping

from packaging.utils import canonicalize_name
from packaging.version import Version

from imagefactory.errors import LockError
from imagefactory.gpu.capability import AMD64
from imagefactory.gpu.values import rocm_of
from imagefactory.model import NO_CUDA, Lock, LockedWheel, Target


def cuda_runtimes(lock: Lock) -> tuple[LockedWheel, ...]:
    """Return the wheels with a CUDA runtime library; an image must have only one."""
    pattern = re.compile(r"nvidia-cuda-runtime(-cu[0-9]+)?")
    runtimes = tuple(wheel for wheel in lock.wheels if pattern.fullmatch(wheel.name))
    return runtimes or tuple(wheel for wheel in lock.wheels if wheel.name == "cuda-toolkit")


def cuda_only_wheels(lock: Lock) -> tuple[LockedWheel, ...]:
    """Return the wheels that are only for NVIDIA GPUs, by name; without nvidia-ml-py, which only queries."""
    pattern = re.compile(r"nvidia-(?!ml-py$).*|cuda-.*|.*-cu(da)?[0-9]+x?(-.*)?")
    return tuple(wheel for wheel in lock.wheels if pattern.fullmatch(wheel.name))


# Distributions whose own version is that of the CUDA toolkit.
_TOOLKIT = re.compile(r"cuda-toolkit|nvidia-cuda-(runtime|nvrtc|cupti|nvcc)|nvidia-(nvjitlink|nvtx|cublas)")
# CCCL is headers: nothing of it is loaded.
_SUFFIX = re.compile(r"(?:nvidia(?!-cuda-cccl)|jax|cupy)-(?:.*-)?cu(?:da)?([0-9]{2})[0-9x]?(?:-.*)?")


def cuda_majors(wheels: Iterable[LockedWheel]) -> dict[int, tuple[LockedWheel, ...]]:
    """Return the wheels with libraries of one CUDA, by its major version, if their names have it."""
    majors: dict[int, tuple[LockedWheel, ...]] = {}
    for wheel in wheels:
        major = 0
        if named := _SUFFIX.fullmatch(wheel.name):
            major = int(named[1])
        elif _TOOLKIT.fullmatch(wheel.name):
            major = Version(wheel.version).major
        if major > 10:  # releases before have no wheels; 0.0.1 are placeholders
            majors[major] = (*majors.get(major, ()), wheel)
    return majors


def check_single_cuda(target: str, wheels: Iterable[LockedWheel], via: Mapping[str, Collection[str]]) -> None:
    """Raise LockError if wheels have libraries of two CUDA majors. `via` are the packages that require each.

    Exempt are libraries for several majors that one package requires, because it loads the one that fits
    (nvidia-cutlass-dsl-libs-cu12 and -cu13).
    """
    majors = cuda_majors(_without_pairs(tuple(wheels), via))
    if len(majors) < 2:
        return
    libraries = {wheel.name for some in majors.values() for wheel in some}
    text, bringers = list[str](), dict[int, str]()
    for major, some in sorted(majors.items()):
        by = sorted({name for wheel in some for name in via.get(wheel.name, ()) if name not in libraries})
        bringers[major] = " and ".join(by) or "the recipe"
        more = f" and {len(some) - 1} more" if len(some) > 1 else ""
        text.append(f"CUDA {major} ({some[0].name} {some[0].version}{more}, required by {bringers[major]})")
    raise LockError(
        "cuda-runtime-conflict",
        f"{target}: the lock would have libraries of {' and of '.join(text)}",
        hint=f"use one CUDA version: constrain or remove {' or '.join(dict.fromkeys(bringers.values()))}",
    )


def _without_pairs(
    wheels: Iterable[LockedWheel], via: Mapping[str, Collection[str]]
) -> Iterable[LockedWheel]:
    """Return the wheels, without a library for several majors that one package requires."""
    series: dict[tuple[str, str], set[str]] = {}
    for wheel in wheels:
        if (named := _SUFFIX.fullmatch(wheel.name)) is not None:
            stem = wheel.name[: named.start(1)]
            for requirer in via.get(wheel.name, ()):
                series.setdefault((requirer, stem), set()).add(wheel.name)
    pairs = set[str]().union(*(names for names in series.values() if len(names) > 1))
    return (wheel for wheel in wheels if wheel.name not in pairs)


def cuda_version(lock: Lock) -> str | None:
    """Return the CUDA version of a lock, as `12.1`; None without a CUDA runtime."""
    versions = [Version(wheel.version) for wheel in cuda_runtimes(lock)]
    return f"{max(versions).major}.{max(versions).minor}" if versions else None


def check_facts(lock: Lock, target: Target) -> None:
    """Raise LockError unless `lock` has the target's framework version and CUDA version, or none."""
    framework = next((w for w in lock.wheels if w.name == canonicalize_name(target.framework)), None)
    if framework is None:
        raise LockError(
            "framework-not-locked",
            f"{target.name}: the lock does not have the framework '{target.framework}'",
            hint=f"run imagefactory lock {target.name}",
        )
    came = f"{framework.name} {framework.version}"
    if not _agrees(target.version, f"{Version(framework.version).base_version}.0.0"):  # 2.3 is 2.3.0 too
        raise LockError(
            "framework-version-mismatch",
            f"{target.name}: {came} was locked, the recipe asks for {target.version}",
            hint=f"change the packages at {target.where}, so that they allow version {target.version}",
        )
    rocm = rocm_of(target.cuda)
    if target.cuda == NO_CUDA or rocm:
        if wheels := cuda_only_wheels(lock):
            raise LockError(
                "gpu-package-unwanted",
                f"{target.name}: {came} comes with {wheels[0].name} {wheels[0].version}, which is for "
                f"{'NVIDIA' if rocm else 'GPUs'}, and the recipe says "
                f"{f'rocm: [{rocm}]' if rocm else 'cuda: [none]'}",
                hint=f"remove the requirement at {target.where}, or use the framework's build for "
                + ("ROCm" if rocm else "CPUs (for PyTorch on conda-forge: source: conda)"),
            )
        if rocm:
            _check_rocm(lock, target, came)
        return
    runtimes, cuda = cuda_runtimes(lock), cuda_version(lock)
    if cuda is None:
        raise LockError(
            "cuda-missing",
            f"{target.name}: {came} and its dependencies include no CUDA runtime: "
            "the image would silently compute on the CPU",
            hint=f"add the extra or the nvidia-cuda-runtime package that provides CUDA at {target.where}"
            + ("" if target.platform == AMD64 else f"; older releases may have none for {target.platform}"),
        )
    if framework.name == "jax" and not any(map(_runs_jax_on_cuda, lock.wheels)):
        raise LockError(
            "cuda-plugin-missing",
            f"{target.name}: {came} comes without its CUDA plugin: it would silently compute on the CPU",
            hint=f"write extras: [cuda{target.cuda.partition('.')[0]}] at {target.where}, with JAX 0.4.24 or "
            "newer",
        )
    brought = " and ".join(f"{wheel.name} {wheel.version}" for wheel in runtimes)
    if len(runtimes) > 1:
        raise LockError(
            "cuda-runtime-conflict",
            f"{target.name}: {came} comes with more than one CUDA runtime ({brought})",
            hint=f"constrain the packages at {target.where} to one CUDA runtime",
        )
    if not _agrees(target.cuda, cuda):
        raise LockError(
            "cuda-version-mismatch",
            f"{target.name}: {came} comes with CUDA {cuda} ({brought}), the recipe asks for {target.cuda}",
            hint=f'write cuda: ["{cuda}"] at {target.where}, or constrain {runtimes[0].name}',
        )


def _runs_jax_on_cuda(wheel: LockedWheel) -> bool:
    """Return whether a wheel has JAX's code for CUDA: its plugin, or a jaxlib of `0.4.13+cuda12.cudnn89`."""
    built = wheel.name == "jaxlib" and "+cuda" in wheel.version
    return built or re.fullmatch(r"jax-cuda[0-9]+-plugin", wheel.name) is not None


def rocm_builds(lock: Lock) -> tuple[tuple[LockedWheel, str], ...]:
    """Return the wheels built for ROCm, with the ROCm version (`7`, `6.4`) if known.

    It is in their name (`jax-rocm7-plugin`, `cupy-rocm-7-0`), in their local version (`2.9.1+rocm6.4`), or
    in a fourth number (`tensorflow-rocm 2.14.0.600`).
    """
    builds = []
    for wheel in lock.wheels:
        local = re.search(r"\+rocm([0-9]+\.[0-9]+)", wheel.version)
        named = re.search(r"-rocm-?([0-9])-?([0-9])?(?:-|$)", wheel.name)
        fourth = re.fullmatch(r"[0-9]+\.[0-9]+\.[0-9]+\.([0-9])([0-9])[0-9]", wheel.version)
        if local:
            builds.append((wheel, local[1]))
        elif named:
            builds.append((wheel, ".".join(filter(None, named.groups()))))
        elif wheel.name.endswith(("-rocm", "-migraphx")):
            builds.append((wheel, f"{fourth[1]}.{fourth[2]}" if fourth else ""))
    return tuple(builds)


def _check_rocm(lock: Lock, target: Target, came: str) -> None:
    builds = rocm_builds(lock)
    if not builds:
        raise LockError(
            "rocm-missing",
            f"{target.name}: {came} and its dependencies include nothing for ROCm: "
            "the image would silently compute on the CPU",
            hint=f"add the extra or package that provides it at {target.where}, such as rocm7-local of jax",
        )
    version = rocm_of(target.cuda)
    for wheel, rocm in builds:
        if rocm and not _agrees(version, rocm):
            raise LockError(
                "rocm-version-mismatch",
                f"{target.name}: {wheel.name} {wheel.version} is built for ROCm {rocm}, "
                f"the recipe asks for {version}",
                hint=f'write rocm: ["{rocm}"] at {target.where}, or constrain {wheel.name}',
            )


def _agrees(required: str, came: str) -> bool:
    """Return whether a release begins with the parts of `required`: 2.3 agrees with 2.3.1, not with 2.30."""
    parts = required.split(".")
    return [str(part) for part in Version(came).release[: len(parts)]] == parts
