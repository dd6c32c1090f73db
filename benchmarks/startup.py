"""Measure the CPU seconds of commands that only look something up, each next to a floor in the same round.

    startup.py --folder .benchmark-startup --trials 20 --write

The floor is a Python process that imports click and PyYAML, which every command needs. `list` is measured
with an empty store and with an image for each target, `build` with an image that is built and tested, and
`compat` of a package with an answer in the cache. With `--against DIRECTORY`, another checkout takes its turn
in each round. `--package ''` needs no network. Writes benchmarks/startup.md.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from imagefactory.errors import EXIT_CHECK
from imagefactory.project import load_project
from imagefactory.settings.load import load_settings
from tests.made.pushed import put_base, put_built
from tests.services.factory import make_small_store

ROOT = Path(__file__).parents[1]
TARGET, TINY, GPU = "pytorch-2.3-cu121", "tiny-12.1-cu121", "H100"
FLOOR = (sys.executable, "-c", "import click, yaml")


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A command, and the directory of its store and cache."""

    title: str
    arguments: tuple[str, ...]
    folder: Path

    def cpu(self, checkout: Path) -> float:
        return cpu_seconds((sys.executable, "-m", "imagefactory", *self.arguments), checkout, self.environ)

    @property
    def environ(self) -> dict[str, str]:
        return {
            "IMAGEFACTORY_STORE": str(self.folder / "store"),
            "IMAGEFACTORY_CACHE": str(self.folder / "cache"),
        }


def cpu_seconds(command: tuple[str, ...], directory: Path, environ: Mapping[str, str]) -> float:
    """Return the user and system seconds of a process, which finds its byte code as after an installation."""
    variables = {**os.environ, **environ}
    variables.pop("PYTHONDONTWRITEBYTECODE", None)
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(command, cwd=directory, env=variables, capture_output=True)
    if done.returncode not in (0, EXIT_CHECK):  # a package may not run on the GPU
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}: {done.stderr.decode()}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def fill_store(folder: Path) -> None:
    """A store with a small image for each target of this project that has a lock of its own base."""
    environ = {"IMAGEFACTORY_STORE": str(folder / "store"), "IMAGEFACTORY_CACHE": str(folder / "cache")}
    project = load_project(load_settings(directory=ROOT, start=ROOT, environ=environ), environ)
    for target in project.targets:
        put_base(project, target)
        put_built(project, target)


def cases(folder: Path, package: str) -> list[Case]:
    empty, full, small = (folder / name for name in ("empty", "full", "small"))
    if not full.exists():
        fill_store(full)
    if not small.exists():
        small.mkdir(parents=True)
        make_small_store(small)
    tiny = ("-C", str(small / "tiny"))
    rows = [
        Case(title="`--help`", arguments=("--help",), folder=empty),
        Case(title="`config`", arguments=("config",), folder=empty),
        Case(title="`list`, no images", arguments=("list",), folder=empty),
        Case(title="`list`, an image for each target", arguments=("list",), folder=full),
        Case(title="`show`", arguments=("show", TARGET), folder=empty),
        Case(title="`lock --check` of a target", arguments=("lock", "--check", TARGET), folder=empty),
        Case(title="`build`, nothing changed", arguments=(*tiny, "build", TINY), folder=small),
        Case(title="`compat torch==2.3.0`", arguments=("compat", "torch==2.3.0", "--gpu", GPU), folder=empty),
        Case(title="`search pytorch`", arguments=("search", "pytorch"), folder=empty),
    ]
    if package:
        scanned = ("compat", package, "--gpu", GPU)
        rows.insert(-1, Case(title=f"`compat {package}`, cached", arguments=scanned, folder=empty))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--folder", type=Path, default=ROOT / ".benchmark-startup")
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--against", type=Path, help="another checkout")
    parser.add_argument("--package", default="bitsandbytes==0.43.1")
    parser.add_argument("--write", action="store_true", help="write benchmarks/startup.md")
    options = parser.parse_args()
    checkouts = [ROOT, *([options.against.absolute()] if options.against else [])]
    lines = []
    for case in cases(options.folder.absolute(), options.package):
        for checkout in checkouts:  # its byte code and its answers of the index
            case.cpu(checkout)
        floors, rounds = [], []
        for _ in range(options.trials):
            floors.append(cpu_seconds(FLOOR, ROOT, {}))
            rounds.append([case.cpu(checkout) for checkout in checkouts])
        own = [mine for mine, *_ in rounds]
        ratio = statistics.median(mine / floor for mine, floor in zip(own, floors, strict=True))
        cells = [case.title, f"{statistics.median(own):.2f} s", f"{ratio:.1f} x"]
        if options.against:
            cells.append(f"{statistics.median(mine / other for mine, other in rounds):.2f} x")
        lines.append(f"| {' | '.join(cells)} |")
        print(lines[-1], flush=True)
    if options.write:
        head = ["command", "CPU", "of the floor", *(["of before"] if options.against else [])]
        text = [
            "# CPU seconds of commands that look something up\n",
            f"[startup.py](startup.py) writes this table. {datetime.now(UTC):%Y-%m-%d}, {os.cpu_count()}"
            f" cores with other work, Linux {os.uname().release}, Python {sys.version.split()[0]},",
            f"medians of {options.trials} rounds. The *floor* is a Python process that imports click and",
            "PyYAML, measured in the same round.",
            *(["*Before* is the checkout named by `--against`."] if options.against else []),
            "",
            f"| {' | '.join(head)} |",
            "|---" * len(head) + "|",
            *lines,
        ]
        (ROOT / "benchmarks" / "startup.md").write_text("\n".join(text) + "\n")


if __name__ == "__main__":
    main()
