"""Build a wheel of a package, inside an image, with mounted tools.

    python wheel_builder.py STEP SOURCE OUT TOOLS CUDA

STEP is `requires` (write OUT/requires.json: requirements of the build backend beyond pyproject.toml, PEP 517)
or `wheel`. The suffix `-isolated` hides the packages of the image, as pip does, so that only the tools are
visible. TOOLS/site has pip, setuptools and the build requirements, and nvcc if there are wheels for the CUDA
version of the image. Links to these wheels, and to the headers in the image, form the directory CUDA with the
usual layout of a toolkit. No file is downloaded. Uses only the standard library.
"""

import importlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

PARTS = ("bin", "include", "lib", "nvvm")
OPTIONS = ("--no-deps", "--no-build-isolation", "--no-index", "--no-cache-dir", "--disable-pip-version-check")
ISOLATED = "-isolated"


def main(step: str, source: str, out: str, tools: str, cuda: str) -> None:
    if step == "backend":
        write_requires(Path(source), Path(out))
        return
    site = Path(tools, "site")
    os.environ["PYTHONPATH"] = str(site)
    os.environ["PATH"] = f"{tools}/bin:{os.environ['PATH']}"
    roots = [root for path in (site, *map(Path, sys.path)) for root in sorted(path.glob("nvidia/cu[0-9]*"))]
    if any((root / "bin/nvcc").exists() for root in roots):
        for root in roots:
            link_tree(root, Path(cuda))
        link_libraries(Path(cuda, "lib"))
        Path(cuda, "lib64").symlink_to("lib")
        os.environ |= {"CUDA_HOME": cuda, "CUDACXX": f"{cuda}/bin/nvcc", "LIBRARY_PATH": f"{cuda}/lib"}
        os.environ["PATH"] = f"{cuda}/bin:{os.environ['PATH']}"
    python = make_environment(Path(cuda).with_name("env")) if step.endswith(ISOLATED) else sys.executable
    if step.removesuffix(ISOLATED) == "requires":
        argv = [python, __file__, "backend", source, out, tools, cuda]
    else:
        argv = [python, "-m", "pip", "wheel", "-v", *OPTIONS, "--wheel-dir", out, source]
    os.execv(python, argv)  # noqa: S606 - no shell: these are its words


def make_environment(directory: Path) -> str:
    """Create a virtual environment without packages, and return its Python."""
    argv = [sys.executable, "-m", "venv", "--without-pip", str(directory)]
    subprocess.run(argv, check=True, stdin=subprocess.DEVNULL)
    os.environ["VIRTUAL_ENV"] = str(directory)
    os.environ["PATH"] = f"{directory}/bin:{os.environ['PATH']}"
    return f"{directory}/bin/python"


def write_requires(source: Path, out: Path) -> None:
    """Write the requirements of the build backend. It runs in a copy, because it may write files."""
    copy = out.with_name("copy")
    if source.is_dir():
        shutil.copytree(source, copy, symlinks=True)
    else:
        shutil.unpack_archive(source, copy)
        inside = [path for path in copy.iterdir() if path.is_dir()]
        copy = inside[0] if len(inside) == 1 else copy
    os.chdir(copy)
    build = read_build_system(Path("pyproject.toml"))
    module, _, attribute = build.get("build-backend", "setuptools.build_meta:__legacy__").partition(":")
    sys.path[:0] = [str(copy / path) for path in build.get("backend-path", ())]
    backend = importlib.import_module(module)
    for name in attribute.split(".") if attribute else ():
        backend = getattr(backend, name)
    ask = getattr(backend, "get_requires_for_build_wheel", list)
    (out / "requires.json").write_text(json.dumps([str(requirement) for requirement in ask()]))


def read_build_system(path: Path) -> "dict[str, Any]":
    if not path.exists():
        return {}
    module = "tomllib" if sys.version_info >= (3, 11) else "pip._vendor.tomli"
    document: dict[str, Any] = importlib.import_module(module).loads(path.read_text(encoding="utf-8"))
    return dict(document.get("build-system", {}))


def link_tree(root: Path, destination: Path) -> None:
    """Link the files below `root` into the same directories below `destination`. Existing names stay."""
    for part in PARTS:
        for directory, _, names in os.walk(root / part):
            inside = destination / Path(directory).relative_to(root)
            inside.mkdir(parents=True, exist_ok=True)
            for name in names:
                if not (inside / name).exists():
                    (inside / name).symlink_to(Path(directory, name))


def link_libraries(directory: Path) -> None:
    """Add the names that linkers need (libcudart.so for libcudart.so.13), which wheels lack."""
    for path in sorted(directory.glob("lib*.so.*")):
        plain = directory / f"{path.name.partition('.so.')[0]}.so"
        if not plain.exists():
            plain.symlink_to(path.name)


if __name__ == "__main__":
    main(*sys.argv[1:])
