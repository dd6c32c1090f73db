"""Check that a conda lock has the Python, the framework and the one CUDA of its target.

A build of the framework for the CPU is rejected, because it would silently compute without the GPU. For a
target without GPUs (cuda: [none]), a build for GPUs is rejected.
"""

from __future__ import annotations

import re

from imagefactory.errors import LockError
from imagefactory.gpu.capability import parse_capability
from imagefactory.gpu.values import built_for, minor_version
from imagefactory.lock.pypi import facts as wheel_facts
from imagefactory.lock.pypi.facts import cuda_only_wheels, cuda_runtimes
from imagefactory.model import Lock, LockedCondaPackage, Target
from imagefactory.recipes.values import within

_CPU_ONLY = "cpuonly"
_RUNTIMES = ("cuda-cudart", "cudatoolkit")
"""Packages with the CUDA runtime library. Their version begins with the CUDA version."""
_NAMES = ("pytorch-cuda", "cuda-version")
"""Packages that bind a CUDA version and have this version. The first one in the lock counts.

With `pytorch-cuda` some libraries of NVIDIA's channel, and `cuda-version`, may be newer.
"""
_PARTS = {
    "jax": ("jaxlib",),
    "pytorch": ("libtorch",),
    "pytorch-gpu": ("pytorch", "libtorch"),
    "tensorflow": ("tensorflow-base",),
    "tensorflow-gpu": ("tensorflow-base", "tensorflow"),
}
"""Framework -> packages with its machine code, whose build strings name the device."""
_BOUND = r"(?:[<>=!]=?)?[0-9][0-9.]*(?:\.\*)?"
_BOUNDS = re.compile(rf"{_BOUND}(?:,{_BOUND})*")


def cuda_packages(lock: Lock) -> tuple[LockedCondaPackage, ...]:
    """Return the packages whose version is the CUDA version, the runtime first."""
    packages = {package.name: package for package in lock.conda}
    runtimes = [packages[name] for name in _RUNTIMES if name in packages]
    return (*runtimes, *[packages[name] for name in _NAMES if name in packages][:1])


def cuda_version(lock: Lock) -> str | None:
    """Return the CUDA version of a lock, as `12.1`; None if no package has it."""
    packages = cuda_packages(lock)
    return minor_version(packages[0].version) if packages else None


def check_facts(lock: Lock, target: Target) -> None:
    """Raise LockError unless `lock` has the target's Python, framework version and CUDA version.

    Its channels and virtual packages must be the target's too. With the same content hash, others were
    written manually.
    """
    if (lock.channels, lock.virtual) != (target.channels, target.virtual):
        others = [channel for channel in lock.channels if channel not in target.channels]
        message = f"the channel {others[0]}, which" if others else "channels or virtual packages that"
        raise LockError(
            "lock-recipe-mismatch",
            f"{target.name}: the lock has {message} the recipe does not require",
            hint=f"run imagefactory lock {target.name}",
        )
    packages = {package.name: package for package in lock.conda}
    _check_capabilities(lock, target)
    python = packages.get("python")
    if python is None or not _agrees(target.python, python.version):
        raise LockError(
            "lock-recipe-mismatch",
            f"{target.name}: the lock has {_label(python) if python else 'no python'}, "
            f"the recipe asks for Python {target.python}",
            hint=f"run imagefactory lock {target.name}",
        )
    if target.source != "conda":
        wheel_facts.check_facts(lock, target)
        return
    framework = packages.get(target.framework)
    if framework is None:
        raise LockError(
            "framework-not-locked",
            f"{target.name}: the lock does not have the framework '{target.framework}'",
            hint=f"run imagefactory lock {target.name}",
        )
    if not _agrees(target.version, f"{framework.version}.0.0"):  # 1.0 is 1.0.0 too
        raise LockError(
            "framework-version-mismatch",
            f"{target.name}: {_label(framework)} was locked, the recipe asks for {target.version}",
            hint=f"change the packages at {target.where}, so that they allow version {target.version}",
        )
    parts = (framework, *(packages[name] for name in _PARTS.get(framework.name, ()) if name in packages))
    _check_cuda(lock, target, parts)


def _check_capabilities(lock: Lock, target: Target) -> None:
    """Raise LockError for a package that needs newer or older GPUs than the target's capabilities."""
    for _, lowest, _ in cuda_arch(target):
        for package in lock.conda:
            for text in package.depends:
                name, _, bounds = text.partition(" ")
                if name != "__cuda_arch":
                    continue
                plain = _BOUNDS.fullmatch(bounds.partition(" ")[0])
                if plain and not within(plain[0], lowest):
                    raise LockError(
                        "lock-recipe-mismatch",
                        f"{target.name}: {_label(package)} needs GPUs of compute capability {bounds}, "
                        f"the recipe supports {lowest}",
                        hint=f"run imagefactory lock {target.name}",
                    )


def _check_cuda(lock: Lock, target: Target, parts: tuple[LockedCondaPackage, ...]) -> None:
    runtime_versions = [(minor_version(package.version), package) for package in cuda_packages(lock)]
    built = [(word, part) for part in parts if (word := built_for(part.build))]
    if not target.gpu:
        for_gpus = [part for word, part in built if word != "cpu"]
        for_gpus += [package for _, package in runtime_versions if package.name != "cuda-version"]
        names_for_gpus = [
            *map(_label, for_gpus),
            *(f"{wheel.name} {wheel.version}" for wheel in cuda_only_wheels(lock)),
        ]
        if names_for_gpus:
            raise LockError(
                "gpu-package-unwanted",
                f"{target.name}: {_label(parts[0])} comes with {names_for_gpus[0]}, which is for "
                "GPUs, and the recipe says cuda: [none]",
                hint=f"remove what requires it at {target.where}, such as the constraint of a build "
                f'"*cuda*", or add "{parts[-1].name} * *cpu*"',
            )
        return
    for word, part in built:
        if word == "cpu":
            chain = _cpu_chain(lock, target, part)
            who = f", as {' -> '.join(chain)} asks for it" if chain else ""
            hint = f'add "{part.name} * *cuda*" to the constraints at {target.where}'
            if chain:
                name = chain[0].partition(" ")[0]
                hint = f"remove {name} at {target.where}, or ask for another version of it"
            raise LockError(
                "cpu-build-locked",
                f"{target.name}: {_label(part)} is a build for the CPU{who}: "
                "the image would silently compute without the GPU",
                hint=hint,
            )
    # cuda-version only bounds the versions of other packages.
    if not built and all(package.name == "cuda-version" for _, package in runtime_versions):
        raise LockError(
            "cuda-missing",
            f"{target.name}: {_label(parts[0])} and its dependencies include no CUDA: "
            "the image would silently compute on the CPU",
            hint=f"add a package with the CUDA libraries at {target.where}, such as "
            f'"cuda-cudart {target.cuda}.*"',
        )
    runtimes = [package for _, package in runtime_versions if package.name in _RUNTIMES]
    if len(runtimes) > 1:
        raise LockError(
            "cuda-runtime-conflict",
            f"{target.name}: more than one CUDA runtime ({' and '.join(map(_label, runtimes))})",
            hint=f"constrain the packages at {target.where} to one CUDA runtime",
        )
    if runtime_versions and (wheels := cuda_runtimes(lock)):
        brought = f"{wheels[0].name} {wheels[0].version}"
        raise LockError(
            "cuda-runtime-conflict",
            f"{target.name}: more than one CUDA runtime "
            f"({_label(runtime_versions[0][1])} from conda and {brought} from PyPI)",
            hint=f"get what needs {brought} from conda, or remove it from `pip` at {target.where}",
        )
    # A build for CUDA 12.0 runs with the libraries of 12.6: next to such packages only its major counts.
    major = target.cuda.partition(".")[0] if runtime_versions else target.cuda
    wrong = [pair for pair in runtime_versions if not _fits(target.cuda, pair[0])] or [
        pair for pair in built if not _fits(major, pair[0])
    ]
    if wrong:
        cuda, package = wrong[0]
        names = {package.name for package in lock.conda}
        # conda-forge binds its CUDA libraries to each other by cuda-version; a framework has its build.
        name = "cuda-version" if package.name in _RUNTIMES and "cuda-version" in names else package.name
        dotted = re.search(r"cu(?:da)?[0-9]+\.", package.build)
        build = f"*cuda{target.cuda if dotted else target.cuda.replace('.', '')}*"
        bound = f"{name} * {build}" if package in parts else f"{name} {target.cuda}.*"
        raise LockError(
            "cuda-version-mismatch",
            f"{target.name}: {_label(parts[0])} comes with CUDA {cuda} "
            f"({_label(package)}), "
            f"the recipe asks for {target.cuda}",
            hint=f'write cuda: ["{cuda}"] at {target.where}, or add the constraint "{bound}"',
        )


def _cpu_chain(lock: Lock, target: Target, part: LockedCondaPackage) -> tuple[str, ...]:
    """Return the packages from one of the recipe to the one that requires a CPU build; empty for none."""
    packages = {package.name: package for package in lock.conda}
    requirements = (*target.requirements, *target.constraints)
    roots = [name for text in requirements if (name := split_spec(text)[1]) in packages and name != part.name]
    before: dict[str, str] = dict.fromkeys(roots, "")
    waiting = list(before)
    while waiting:
        name = waiting.pop(0)
        for text in packages[name].depends:
            needed = split_spec(text)[1]
            build = text.split()[2] if len(text.split()) > 2 else ""
            if needed == _CPU_ONLY or (needed == part.name and "cpu" in build):
                chain = [text]
                while name:
                    chain.insert(0, f"{name} {packages[name].version}")
                    name = before[name]
                return tuple(chain)
            if needed in packages and needed not in before and needed != part.name:
                before[needed] = name
                waiting.append(needed)
    return ()


def _label(package: LockedCondaPackage) -> str:
    return f"{package.name} {package.version} {package.build}"


def _agrees(required: str, came: str) -> bool:
    """Return whether `came` begins with the parts of `required`: 2.3 agrees with 2.3.1, not with 2.30."""
    parts = required.split(".")
    return came.split(".")[: len(parts)] == parts


def _fits(required: str, version: str) -> bool:
    """Return `_agrees`, or true if `version` is only a matching major version."""
    return _agrees(required, version) or _agrees(version, required)


def cuda_arch(target: Target) -> tuple[tuple[str, str, str], ...]:
    """Return (name, version, build) of `__cuda_arch`: the lowest capability that the target must support.

    None for CPUs and AMD GPUs. It is not in locks: a lock without packages that need it must stay the same.
    Source: CEP 46, the lowest compute capability of the machine's GPUs.
    """
    capabilities = [text for text in target.capabilities if not text.startswith("gfx")]
    if not (target.gpu and capabilities):
        return ()
    return (("__cuda_arch", min(capabilities, key=parse_capability), "0"),)


def split_spec(text: str) -> tuple[str, str]:
    """Return the channel of a match spec, or an empty text, and the package's name."""
    channel, _, rest = text.rpartition("::")
    return channel, re.split(r"[^A-Za-z0-9_.-]", rest.strip(), maxsplit=1)[0].lower()
