"""Runs inside an image: compiles a package into a wheel, with the tools that are shown beside it.

    python wheel_builder.py SOURCE OUT TOOLS CUDA

TOOLS/site holds pip, setuptools and what else the package builds with; nvcc too, as NVIDIA's wheels lay it,
where the image's CUDA has wheels of it. Those wheels and the image's own, which have the libraries' headers,
become one folder of links, CUDA, as a toolkit's installer lays it. Nothing is fetched. Standard library only.
"""

import os
import sys
from pathlib import Path

PARTS = ("bin", "include", "lib", "nvvm")
OPTIONS = ("--no-deps", "--no-build-isolation", "--no-index", "--no-cache-dir", "--disable-pip-version-check")


def main(source: str, out: str, tools: str, cuda: str) -> None:
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
    argv = [sys.executable, "-m", "pip", "wheel", "-v", *OPTIONS, "--wheel-dir", out, source]
    os.execv(sys.executable, argv)  # noqa: S606 - no shell: these are its words


def link_tree(root: Path, place: Path) -> None:
    """Links of the files below `root` in the same folders below `place`; the first of a name stays."""
    for part in PARTS:
        for folder, _, names in os.walk(root / part):
            inside = place / Path(folder).relative_to(root)
            inside.mkdir(parents=True, exist_ok=True)
            for name in names:
                if not (inside / name).exists():
                    (inside / name).symlink_to(Path(folder, name))


def link_libraries(folder: Path) -> None:
    """The names that linkers look for, libcudart.so for libcudart.so.13: wheels do without them."""
    for path in sorted(folder.glob("lib*.so.*")):
        plain = folder / f"{path.name.partition('.so.')[0]}.so"
        if not plain.exists():
            plain.symlink_to(path.name)


if __name__ == "__main__":
    main(*sys.argv[1:])
