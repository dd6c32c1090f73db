"""The main job against its floor: seconds, ratios, peak memory and bytes written, in one run.

The floor is reading the locked wheels and hashing them once, by one process. Page cache state is the
same for both sides: wheels were read just before ("warm"), or dropped from the cache where the kernel
lets us ("cold").
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
MAIN, SIBLING = "pytorch-2.3-cu121", "pytorch-2.1-cu121"
TAG = "pytorch:2.3-cu121"
CHUNK = 1 << 20


class Job:
    """The command line on a store of its own."""

    def __init__(self, folder: Path, store: str, root: Path = ROOT) -> None:
        self.store, self.cache, self.root = folder / store, folder / "cache", root

    def run(self, *arguments: str, weigh: bool = False) -> tuple[float, int, Any]:
        """Seconds, peak memory of the whole process tree in bytes, and the JSON result.

        Memory is weighed only on demand: looking at it 20 times a second takes a third of a core.
        """
        environ = {
            **os.environ,
            "IMAGEFACTORY_STORE": str(self.store),
            "IMAGEFACTORY_CACHE": str(self.cache),
        }
        command = [
            sys.executable,
            "-m",
            "imagefactory",
            "-C",
            str(self.root),
            *arguments,
            "-q",
        ]
        began = time.monotonic()
        process = subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, text=True)
        peak = PeakMemory(process.pid) if weigh else None
        out, _ = process.communicate()
        seconds = time.monotonic() - began
        if peak is not None:
            peak.stop()
        if process.returncode != 0:
            raise SystemExit(f"{' '.join(command)} ended with {process.returncode}\n{out}")
        return seconds, peak.bytes if peak else 0, json.loads(out) if "--json" in arguments else out

    def build(self, target: str, *options: str, weigh: bool = False) -> tuple[float, int, dict[str, float]]:
        seconds, memory, result = self.run("build", "--json", *options, target, weigh=weigh)
        return seconds, memory, result["results"][0]["seconds"]

    def blob_bytes(self) -> int:
        folder = self.store / "blobs" / "sha256"
        return sum(path.stat().st_size for path in folder.iterdir()) if folder.is_dir() else 0


class PeakMemory:
    """Samples the proportional set size of a process and all its descendants, 20 times a second.

    Proportional: a page that workers share counts once, which is what "summed over workers" costs a machine.
    """

    def __init__(self, pid: int) -> None:
        self.pid, self.bytes, self._ended = pid, 0, threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()

    def _watch(self) -> None:
        while not self._ended.wait(0.05):
            self.bytes = max(self.bytes, sum(_pss(pid) for pid in _descendants(self.pid)))

    def stop(self) -> None:
        self._ended.set()
        self._thread.join()


def _descendants(pid: int) -> list[int]:
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except (OSError, IndexError):
                continue
            children.setdefault(parent, []).append(int(entry.name))
    found, todo = [], [pid]
    while todo:
        found.append(todo.pop())
        todo += children.get(found[-1], [])
    return found


def _pss(pid: int) -> int:
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:
        return 0
    return sum(int(line.split()[1]) * 1024 for line in text.splitlines() if line.startswith("Pss:"))


def read_and_hash(paths: list[Path]) -> float:
    began = time.monotonic()
    for path in paths:
        digest = hashlib.sha256()
        with path.open("rb", buffering=0) as file:
            while data := file.read(CHUNK):
                digest.update(data)
    return time.monotonic() - began


def drop_page_cache() -> bool:
    os.sync()
    try:
        Path("/proc/sys/vm/drop_caches").write_text("1")
    except OSError:
        return False
    return True


def median(trial: Callable[[], float], trials: int) -> float:
    return statistics.median(trial() for _ in range(trials))


def wheel_paths(job: Job, target: str) -> tuple[list[Path], dict[str, dict[str, Any]]]:
    _, _, shown = job.run("show", "--json", target)
    packages = {package["name"]: package for package in shown["packages"]}
    folder = job.cache / "wheels"
    return [folder / p["sha256"][:2] / p["sha256"] / p["file"] for p in packages.values()], packages


def changed_root(folder: Path) -> Path:
    """A factory whose main target differs from ours by one small package."""
    root = folder / "changed"
    for name in ("recipes", "lockfiles"):
        shutil.copytree(ROOT / name, root / name, dirs_exist_ok=True)
    (root / "imagefactory.toml").write_text("")
    path = root / "recipes" / "pytorch.yaml"
    text = path.read_text().replace("packages: [", "packages: [tomli, ", 1)
    if text == path.read_text():
        raise SystemExit("recipes/pytorch.yaml has no `packages: [` to add a package to")
    path.write_text(text)
    return root


def measure(folder: Path, trials: int) -> list[tuple[str, str, str]]:
    job = Job(folder, "store")
    job.build(SIBLING, "--no-smoke")  # fetches what the measured builds need, and makes the base
    job.run("store", "rm", f"pytorch:{SIBLING.removeprefix('pytorch-')}")
    job.run("store", "gc")
    _, memory, _ = job.build(MAIN, "--no-smoke", weigh=True)
    paths, packages = wheel_paths(job, MAIN)
    size = sum(path.stat().st_size for path in paths)
    rows: list[tuple[str, str, str]] = [("wheels", f"{len(paths)}, {size / 1e9:.2f} GB", "")]

    for state in ("warm", "cold"):
        if state == "cold" and not drop_page_cache():
            rows.append(("cold", "not measured: the page cache cannot be dropped here", ""))
            break
        floors, builds = [], []
        for _ in range(trials):
            # A store that holds the base and nothing else; what that wrote goes to disk before, not during.
            job.run("store", "rm", TAG)
            job.run("store", "gc")
            shutil.rmtree(job.cache / "segments", ignore_errors=True)
            os.sync()
            time.sleep(3)
            if state == "cold":
                drop_page_cache()
            floors.append(read_and_hash(paths))
            if state == "cold":
                drop_page_cache()
            builds.append(job.build(MAIN, "--no-smoke")[2]["assemble"])
        floor, build = statistics.median(floors), statistics.median(builds)
        spread = f"{min(builds):.1f} to {max(builds):.1f} s"
        rows.append((f"read and sha256 the wheels once ({state})", f"{floor:.2f} s", "1.0x"))
        rows.append(
            (f"lock to image ({state}, {spread})", f"{build:.1f} s", f"{build / floor:.1f}x (at most 10x)")
        )
        if state == "warm":
            rows.append(("peak memory, all processes", f"{memory / 1e6:.0f} MB", "at most 400 MB"))

    same = median(lambda: job.build(MAIN, "--no-smoke")[0], trials)
    rows.append(("nothing changed, whole command", f"{same:.2f} s", "at most 1 s"))

    before = job.blob_bytes()
    job.build(SIBLING, "--no-smoke")
    _, theirs = wheel_paths(job, SIBLING)
    differing = sum(p["size"] for n, p in theirs.items() if packages.get(n, {}).get("sha256") != p["sha256"])
    written = job.blob_bytes() - before
    amount = f"{written / 1e6:.0f} MB, differing wheels {differing / 1e6:.0f} MB"
    rows.append((f"{SIBLING} after it writes", amount, f"{written / differing:.2f}x (at most 1.05x)"))

    changed = Job(folder, "store", root=changed_root(folder))
    changed.run("lock", MAIN)
    # The one new wheel comes into the cache by a build elsewhere: fetching is timed apart.
    fetched = Job(folder / "fetched", "store", root=changed.root)
    fetched.cache.mkdir(parents=True, exist_ok=True)
    for name in ("wheels", "debs"):
        if not (fetched.cache / name).exists():
            (fetched.cache / name).symlink_to(changed.cache / name)
    fetched.build(MAIN, "--no-smoke")
    shutil.rmtree(folder / "fetched")
    job.build(MAIN, "--no-smoke")
    seconds, _, result = changed.run("build", "--json", "--no-smoke", MAIN)
    if not result["results"][0]["fresh"]:
        raise SystemExit("the changed target was not built anew")
    rows.append(("one small package added, whole command", f"{seconds:.2f} s", "at most 2 s"))

    tried = Job(folder, "store")
    _, _, stages = tried.build(MAIN)
    rows.append(("unpack, once", f"{stages['unpack']:.1f} s", ""))
    rows.append(("smoke test inside the image", f"{stages['smoke']:.1f} s", ""))
    for name, arguments in (("list", ("list",)), ("--help", ("--help",))):
        rows.append(
            (
                f"imagefactory {name}",
                f"{median(lambda a=arguments: tried.run(*a)[0], 5):.2f} s",
                "at most 0.3 s",
            )
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--folder", type=Path, required=True, help="scratch: 20 GB, emptied but for the wheels"
    )
    parser.add_argument("--trials", type=int, default=3)
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    rows = measure(arguments.folder.absolute(), arguments.trials)
    print(f"| {os.cpu_count()} cores, median of {arguments.trials} | | |\n|---|---|---|")
    for row in rows:
        print(f"| {' | '.join(row)} |")


if __name__ == "__main__":
    main()
