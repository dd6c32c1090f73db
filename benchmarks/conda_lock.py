"""Locking a conda target against the bare solver, in one run: ratios, and seconds of an unchanged lock.

    .venv/bin/python benchmarks/conda_lock.py --channels FOLDER --trials 7

`FOLDER` holds records of conda-forge, pytorch and nvidia; they are served on 127.0.0.1, so that both sides
ask over HTTP and neither waits for a network. Asked for is python 3.11 with pytorch 2.3 and pytorch-cuda
12.1. The sides take turns within a trial, each in a process of its own:

    bare        rattler.solve() with a gateway, a client and the virtual packages, and nothing else
    lock        CondaLocker.lock(): the same question, its answer as a Lock with its facts checked

"cold" begins with an empty cache of records, "warm" with what the run before left. "unchanged" is the whole
command `imagefactory lock TARGET` when nothing has changed, beside `imagefactory --version`.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from imagefactory.recipes.values import CHANNEL_ROOT
from tests.services.channels import channel_server

ROOT = Path(__file__).parents[1]
CHANNELS = ("pytorch", "nvidia", "conda-forge")
TARGET = "measured-2.3-cu121"
RECIPE = """\
family: measured
description: what the benchmark locks
source: conda
framework: pytorch
channels: [pytorch, nvidia, conda-forge]
platform: linux/amd64
base: debian-12
python: "3.11"
capabilities: ["8.0"]
matrix:
  - version: "2.3"
    cuda: ["12.1"]
    packages: [pytorch-cuda=12.1]
"""

BARE = """
import asyncio, sys, time
from rattler import BuildString, Channel, Gateway, GenericVirtualPackage, MatchSpec, PackageName, Version
from rattler import solve
from rattler.networking import Client
url, cache = sys.argv[1:]
began = time.monotonic()
virtual = [("__archspec", "1", "x86_64"), ("__cuda", "12.1", "0"), ("__glibc", "2.36", "0"),
           ("__linux", "0", "0"), ("__unix", "0", "0")]
found = asyncio.run(solve(
    sources=[Channel(f"{url}/{name}") for name in ("pytorch", "nvidia", "conda-forge")],
    specs=[MatchSpec(text) for text in ("pytorch 2.3.*", "pytorch-cuda 12.1.*", "python 3.11.*")],
    gateway=Gateway(cache_dir=cache, client=Client.default_client()),
    platforms=["linux-64", "noarch"],
    virtual_packages=[
        GenericVirtualPackage(PackageName(n), Version(v), BuildString(b)) for n, v, b in virtual
    ],
))
print(time.monotonic() - began, sorted(record.file_name for record in found))
time.sleep(0.05)
"""

LOCK = """
import sys, time
from pathlib import Path
from imagefactory.lock import LockRequest
from imagefactory.lock.conda.channels import find_channels
from imagefactory.lock.conda.locker import CondaLocker
from imagefactory.progress import QuietProgress
from imagefactory.settings.load import load_settings
from imagefactory.project import load_project
import rattler
setting, cache, root = sys.argv[1:]
factory = load_project(load_settings(directory=Path(root), start=Path(root), environ={}), {})
(target,) = [target for target in factory.targets if target.name == "measured-2.3-cu121"]
base = factory.base_of(target)
began = time.monotonic()
locker = CondaLocker(find_channels(setting, {}, ""), Path(cache), lambda: None)
lock = locker.lock(LockRequest(target=target, base=base), QuietProgress())
print(time.monotonic() - began, sorted(package.filename for package in lock.conda))
"""


def seconds(script: str, *arguments: str) -> tuple[float, str]:
    """What the script measured of itself, and its packages."""
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", script, *arguments]
    done = subprocess.run(command, env=environ, stdout=subprocess.PIPE, text=True, check=True)
    measured, _, packages = done.stdout.strip().partition(" ")
    return float(measured), packages


def command(root: Path, environ: dict[str, str], *arguments: str) -> tuple[float, str]:
    """Seconds of one whole command, and what it printed."""
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "imagefactory", "-C", str(root), *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT), **environ},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return time.monotonic() - began, done.stdout


def make_root(folder: Path) -> Path:
    """A factory of one recipe on this repository's bases."""
    (folder / "recipes").mkdir(parents=True)
    shutil.copy(ROOT / "recipes/bases.yaml", folder / "recipes/bases.yaml")
    (folder / "recipes/measured.yaml").write_text(RECIPE)
    (folder / "imagefactory.toml").touch()
    return folder


def measure(channels: Path, folder: Path, trials: int) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    root = make_root(folder / "root")
    with channel_server(channels) as server:
        setting = f"{CHANNEL_ROOT}={server.url}"
        for _ in range(trials):
            answers = set()
            for state in ("cold", "warm"):
                sides = {"bare": (BARE, server.url), "lock": (LOCK, setting)}
                for side, (script, where) in sides.items():
                    cache = folder / f"cache-{side}"
                    if state == "cold":
                        shutil.rmtree(cache, ignore_errors=True)
                    more = (str(root),) if side == "lock" else ()
                    took, packages = seconds(script, where, str(cache), *more)
                    found.setdefault(f"{state} {side}", []).append(took)
                    answers.add(packages)
            if len(answers) != 1:
                raise SystemExit(f"the two sides found different packages: {answers}")
        environ = {"IMAGEFACTORY_CHANNELS": setting, "IMAGEFACTORY_CACHE": str(folder / "cache")}
        command(root, environ, "lock", TARGET)
        asked = len(server.asked)
        for _ in range(trials):
            for name, arguments in (("unchanged", ("lock", TARGET)), ("version", ("--version",))):
                took, _ = command(root, environ, *arguments)
                found.setdefault(name, []).append(took)
        if len(server.asked) != asked:
            raise SystemExit("an unchanged lock asked for records")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--channels", type=Path, required=True, help="a folder with the channels' records")
    parser.add_argument("--trials", type=int, default=7)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="imagefactory-benchmark-") as folder:
        found = measure(options.channels, Path(folder), options.trials)
    middle = {name: statistics.median(values) for name, values in found.items()}
    print("| what | bare `rattler.solve` | lock | ratio (limit 1.3) |\n|---|---|---|---|")
    for state in ("cold", "warm"):
        bare, lock = middle[f"{state} bare"], middle[f"{state} lock"]
        pairs = zip(found[f"{state} lock"], found[f"{state} bare"], strict=True)
        ratios = sorted(one / other for one, other in pairs)
        best = min(found[f"{state} lock"]) / min(found[f"{state} bare"])
        print(
            f"| {state} | {bare:.3f} s | {lock:.3f} s | "
            f"{lock / bare:.2f} (of the best {best:.2f}, "
            f"of pairs {ratios[0]:.2f} to {ratios[-1]:.2f}, median {statistics.median(ratios):.2f}) |"
        )
    print(f"\nunchanged, the whole command: {middle['unchanged']:.2f} s (limit 0.5); ", end="")
    print(f"`imagefactory --version`: {middle['version']:.2f} s")
    print(json.dumps({name: [round(value, 3) for value in values] for name, values in found.items()}))


if __name__ == "__main__":
    main()
