"""What an image would save without the files that no program in it reads, from the lists of its wheels.

    slim.py pytorch-2.15-cu132 tensorflow-2.21-cu12

Only the list at the end of each wheel is read, some MB in all. No framework, and no compiler that it starts,
opens the files that count as *unread*. It opens those that count as *read*, when a program calls for them.
"""

from __future__ import annotations

import argparse
import os
import re
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from imagefactory.access import package_index, uv_locker
from imagefactory.http import HttpSession, read_some
from imagefactory.lock.files import read_lock
from imagefactory.model import LockedWheel
from imagefactory.project import load_project
from imagefactory.scan.zip import remote_members
from imagefactory.settings.load import load_settings

ROOT = Path(__file__).parents[1]
KINDS = (
    ("read: static libraries", r"/lib(cudadevrt|cudart_static)\.a$"),  # by Numba and CuPy, by Inductor
    ("unread: static libraries", r"\.a$"),
    ("unread: headers of TensorFlow", r"^tensorflow/include/"),
    ("unread: tests", r"(^|/)tests?/"),
    ("read: headers", r"/include/|\.(h|hpp|cuh|inl|inc)$"),
    ("read: bitcode for GPUs", r"\.(bc|ltoir|o)$"),
)


def kind_of(path: str) -> str:
    return next((kind for kind, pattern in KINDS if re.search(pattern, path)), "all else")


def weigh(web: HttpSession, wheel: LockedWheel, url: str) -> tuple[Counter[str], Counter[str]]:
    """Return the bytes of each kind of file, compressed and unpacked."""

    def read_range(start: int, end: int) -> bytes:
        headers = {"Range": f"bytes={start}-{end - 1}"}
        return web.request(url, lambda response: read_some(response.raw, end - start), headers=headers)

    packed, unpacked = Counter[str](), Counter[str]()
    for member in remote_members(read_range, wheel.size, wheel.filename):
        kind = kind_of(member.info.filename)
        packed[kind] += member.info.compress_size
        unpacked[kind] += member.info.file_size
    return packed, unpacked


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("targets", nargs="+", help="targets with wheels and a lock")
    options = parser.parse_args()
    project = load_project(load_settings(directory=ROOT, start=ROOT, environ=os.environ), os.environ)
    index = package_index(project)
    for name in options.targets:
        lock = read_lock(project.lock_folder, project.select_single(name))
        if lock is None:
            raise SystemExit(f"{name} has no lock")
        urls = uv_locker(index).addresses(lock)
        with HttpSession(index) as web, ThreadPoolExecutor(8) as pool:
            parts = pool.map(
                partial(weigh, web), lock.wheels, (urls[wheel.filename] for wheel in lock.wheels)
            )
            packed, unpacked = map(sum_of, zip(*parts, strict=True))
        print(f"{name}: {packed.total() / 1e6:.0f} MB compressed, {unpacked.total() / 1e6:.0f} MB unpacked")
        for kind in sorted(packed):
            print(
                f"  {kind:32}{packed[kind] / 1e6:8.1f} MB {packed[kind] / packed.total():6.1%}"
                f"{unpacked[kind] / 1e6:8.1f} MB {unpacked[kind] / unpacked.total():6.1%}"
            )


def sum_of(counts: tuple[Counter[str], ...]) -> Counter[str]:
    return sum(counts, Counter())


if __name__ == "__main__":
    main()
