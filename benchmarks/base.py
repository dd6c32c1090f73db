"""Seconds and CPU seconds of a base, unpacked at once by hooks, against one package after the other by dpkg.

The ways take turns. The packages come from the cache or from Debian's archive, before the clock starts. A
build that gives another layer ends the run.
"""

from __future__ import annotations

import argparse
import os
import resource
import tempfile
import time
from pathlib import Path

from imagefactory.build.base.fetch import fetch_base
from imagefactory.build.base.make import build_base
from imagefactory.lock.debian.archive import find_mirror, lock_base
from imagefactory.progress import QuietProgress
from imagefactory.recipes.read import read_bases


def cpu_seconds() -> float:
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("base", nargs="?", default="debian-12", help="a base of recipes/bases.yaml")
    parser.add_argument("--debs", type=Path, default=Path(".benchmark/debs"), help="cache of packages")
    parser.add_argument("--trials", type=int, default=3)
    options = parser.parse_args()
    base = next(base for base in read_bases(Path("recipes")) if base.name == options.base)
    mirror = find_mirror("", options.debs, os.environ, etc_apt=Path("/etc/apt"), snapshot="none")
    fetched = fetch_base(base, lock_base(base, None, mirror, QuietProgress()), mirror, QuietProgress())
    layers = set()
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(options.trials):
            for one_by_one in (False, True):
                started, cpu = time.monotonic(), cpu_seconds()
                tar = build_base(
                    fetched,
                    Path(folder) / "base.tar",
                    QuietProgress(),
                    environ=os.environ,
                    one_by_one=one_by_one,
                )
                seconds, cpu = time.monotonic() - started, cpu_seconds() - cpu
                way = "one by one" if one_by_one else "at once"
                print(f"{base.name} {way:10}  {seconds:6.1f} s  {cpu:6.1f} CPU s", flush=True)
                layers.add(tar.sha256)
    if len(layers) != 1:
        raise SystemExit("the layers differ")


if __name__ == "__main__":
    main()
