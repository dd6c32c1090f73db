"""What a site of many images costs its users: CPU seconds and peak memory of whole commands, by size.

    search         every image on all GPUs of an inventory; the best 20 are shown
    search words   the same for one framework and version
    job write      a job file, with all verdicts of its image
    sweep          the plan of a sweep (`--dry-run`) of as many cells as images, of targets on 8 GPUs
    light          the same where the signatures are checked without a compiled library

The verdicts are made up, and all signatures are real. CPU seconds are those of the process (user and system),
so other work on the machine counts less. One run before the first trial fills the cache. With `--write` the
figures become the table and the picture of docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.told import format_curves
from imagefactory.lock.changes import content_hash
from imagefactory.project import load_project
from imagefactory.settings.load import load_settings
from imagefactory.trust.catalog import LIFE, sign_catalog
from tests.made.catalog import make_catalog
from tests.made.report import format_key_row, many_images
from tests.made.verdicts import LAB, LAB_TRUSTED

SIZES = (100, 1_000, 10_000)
GPUS_AN_IMAGE, GPUS_A_MACHINE = 3, 8
MODELS = (("7.0", "Tesla V100-SXM2-32GB", 32), ("8.0", "NVIDIA A100-SXM4-80GB", 80))
MODELS += (("8.9", "NVIDIA L40S", 46), ("9.0", "NVIDIA H100 80GB HBM3", 80), ("12.0", "Made RTX", 96))
CELL_GPUS = ("7.0", "7.5", "8.0", "8.6", "8.9", "9.0", "10.0", "12.0")
COPIED, BLANK, ROOT = "numba", "\n\n", Path(__file__).parents[1]
GOALS = {"search": 1.0, "search words": 1.0, "job write": 0.5, "sweep": 10.0}
LIGHT = ("cryptography", "nacl", "isal", "zstandard", "tomlkit", "requests", "rich", "jinja2")


def write_site(folder: Path, images: int) -> None:
    """A user's settings, the signed catalog that they name, and an inventory."""
    now = datetime.now(UTC).replace(microsecond=0)
    config = folder / "config" / "imagefactory"
    config.mkdir(parents=True)
    catalog = folder / "catalog.json.gz"
    made = now - timedelta(hours=1)
    signed = sign_catalog(make_catalog(*many_images(images), created=made, expires=made + LIFE), LAB)
    catalog.write_bytes(signed)
    (config / "imagefactory.toml").write_text(f'catalog = "{catalog}"\n{format_key_row(LAB_TRUSTED)}')
    (folder / "pool.json").write_text(json.dumps(_inventory(images * GPUS_AN_IMAGE, now)))
    write_project(folder / "project", images // len(CELL_GPUS))
    cells = [
        {"name": f"g{number}.example.org", "start": "true", "attributes": {"HasSIF": True}, "gpus": [gpu]}
        for number, gpu in enumerate(map(_cell_gpu, CELL_GPUS))
    ]
    document = {"format": "imagefactory.inventory/1", "pool": "cm.example.org", "machines": cells}
    taken = {"taken": f"{now:%Y-%m-%dT%H:%M:%SZ}"}
    (folder / "cells.json").write_text(json.dumps({**document, **taken}))


def write_project(folder: Path, targets: int) -> None:
    """A project of copies of one target, with their locks. Each has a recipe of its own."""
    (folder / "recipes").mkdir(parents=True)
    (folder / "imagefactory.toml").write_text("")
    shutil.copy(ROOT / "recipes" / "bases.yaml", folder / "recipes")
    shutil.copytree(ROOT / "lockfiles" / "bases", folder / "lockfiles" / "bases")
    head, _, matrix = (ROOT / "recipes" / f"{COPIED}.yaml").read_text().partition("\nmatrix:\n")
    for number in range(targets):
        family = head.replace(f"family: {COPIED}", f"family: {COPIED}{number}")
        path = folder / "recipes" / f"{COPIED}{number}.yaml"
        path.write_text(f"{family}\nmatrix:\n{matrix.partition(BLANK)[0]}\n")
    project = load_project(load_settings(directory=folder, start=folder, environ={}), {})
    for target in project.targets:
        name = f"{COPIED}-{target.name.partition('-')[2]}"
        lock = (ROOT / "lockfiles" / f"{name}.requirements.txt").read_text().replace(name, target.name)
        digest = content_hash(target, project.base_of(target), None)
        text = re.sub("(?<=# content-hash: ).*", digest, lock)
        (folder / "lockfiles" / f"{target.name}.requirements.txt").write_text(text)


def _cell_gpu(capability: str) -> dict[str, object]:
    name = f"GPU-{capability.replace('.', ''):0>8}"
    gpu = {"id": name, "uuid": f"{name}-0000-0000-0000-000000000000", "name": f"Made {capability}"}
    return {
        **gpu, "capability": capability, "memory": 80 << 30, "driver": "580.65.06", "cuda": "13.0",
        "mig": False, "free": True,
    }  # fmt: skip


def _inventory(gpus: int, now: datetime) -> dict[str, object]:
    return {
        "format": "imagefactory.inventory/1",
        "pool": "cm.example.org",
        "taken": f"{now:%Y-%m-%dT%H:%M:%SZ}",
        "machines": [_machine(number) for number in range(gpus // GPUS_A_MACHINE)],
    }


def _machine(number: int) -> dict[str, object]:
    """No two machines have the same memory and disk, as in real pools."""
    capability, name, memory = MODELS[number % len(MODELS)]
    has = {"HasSIF": True, "HasSandboxImage": True, "HasDockerURL": number % 2 == 0}
    sizes = {"Cpus": 64, "Memory": 1_000_000 + number, "Disk": 3 * 10**9 + number}
    gpu = {"name": name, "capability": capability, "memory": memory << 30, "driver": "550.54.15"}
    gpus = [
        {
            "id": f"GPU-{number:06x}{place:02x}",
            "uuid": f"GPU-{number:08x}-0000-0000-0000-{place:012x}",
            **gpu,
            "cuda": "12.4",
            "mig": False,
            "free": (number + place) % 3 == 0,
        }
        for place in range(GPUS_A_MACHINE)
    ]
    attributes = {"Arch": "X86_64", "OpSys": "LINUX", **sizes, **has}
    return {"name": f"gpu{number:05}.example.org", "start": "true", "attributes": attributes, "gpus": gpus}


def measure(folder: Path, *arguments: str, light: bool = False) -> tuple[float, int]:
    """CPU seconds and peak bytes of one command."""
    hide = f"for name in {LIGHT!r}: sys.modules[name] = None\n" if light else ""
    program = f"import sys\n{hide}from imagefactory.cli import main\nsys.exit(main())"
    environ = {
        **os.environ,
        "XDG_CONFIG_HOME": str(folder / "config"),
        "XDG_CACHE_HOME": str(folder / "cache"),
        "XDG_CONFIG_DIRS": "/none",
        "IMAGEFACTORY_STORE": str(folder / "store"),
        "PYTHONPATH": str(Path(__file__).parents[1]),
    }
    environ.pop("PYTHONDONTWRITEBYTECODE", None)  # byte code is there after the first run, as for users
    work = folder / "work"
    work.mkdir(exist_ok=True)
    command = [sys.executable, "-I", "-S", "-c", _MEASURE, sys.executable, "-c", program, *arguments]
    run = subprocess.run(command, env=environ, cwd=work, capture_output=True, text=True, check=False)
    *_, last = run.stdout.splitlines() or [""]
    if run.returncode:
        raise SystemExit(
            f"{arguments} ended with {run.returncode}:\n{run.stdout[-2000:]}{run.stderr[-2000:]}"
        )
    seconds, peak = last.split()
    return float(seconds), int(peak) * 1024


# In a small process: Linux counts the memory of the process that starts another one as that one's peak.
_MEASURE = """
import os, sys
child = os.fork()
if not child:
    os.execv(sys.argv[1], sys.argv[1:])
_, status, used = os.wait4(child, 0)
print("\\n", used.ru_utime + used.ru_stime, used.ru_maxrss)
sys.exit(os.waitstatus_to_exitcode(status))
"""


def commands(folder: Path, images: int) -> dict[str, tuple[str, ...]]:
    inventory = ("--inventory", str(folder / "pool.json"))
    words = ("pytorch", f"2.{images // 6 - 1}")
    target = f"pytorch-2.{images // 6 - 1}-cu121"
    return {
        "search": ("search", *inventory),
        "search words": ("search", *words, *inventory),
        "job write": ("job", "write", target, "--force", "--allow-unverified"),
        "sweep": (
            *("-C", str(folder / "project"), "sweep", "start", "*", "--dry-run", "--scheduler", "htcondor"),
            *("--image-format", "sif", "--inventory", str(folder / "cells.json")),
        ),
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """The CPU seconds of each trial of a command, the most memory in bytes, and the number of images."""

    name: str
    light: bool
    images: int
    seconds: tuple[float, ...]
    peak: int

    @property
    def title(self) -> str:
        return f"{self.name}, light install" if self.light else self.name

    def format(self) -> str:
        low, high = min(self.seconds), max(self.seconds)
        return f"{statistics.median(self.seconds):.2f} s ({low:.2f} to {high:.2f}), {self.peak >> 20} MB"


def format_table(rows: Sequence[Measured]) -> str:
    """Markdown: a row for each command, a column for each size, and the goal at the largest one."""
    sizes = sorted({row.images for row in rows})
    lines = [f"| images | {' | '.join(f'{size:,}' for size in sizes)} | goal at {sizes[-1]:,} |"]
    lines.append("|---" * (len(sizes) + 2) + "|")
    for title in dict.fromkeys(row.title for row in rows):
        own = {row.images: row for row in rows if row.title == title}
        goal, last = GOALS[own[sizes[-1]].name], statistics.median(own[sizes[-1]].seconds)
        mark = "met" if last <= goal else "**not met**"
        cells = " | ".join(own[size].format() for size in sizes)
        lines.append(f"| {title} | {cells} | {goal:g} s, {mark} |")
    return "\n".join(lines) + "\n"


def write_page(rows: Sequence[Measured], about: str) -> None:
    page = ROOT / "docs" / "benchmarks.md"
    before, rest = page.read_text().split("<!-- scale -->\n", 1)
    after = rest.split("<!-- end -->\n", 1)[1]
    picture = "![CPU seconds by the number of images](scale.svg)"
    intro = f"{about}, CPU seconds and peak memory of whole commands, medians."
    text = f"{picture}\n\n{intro}\n\n{format_table(rows)}"
    page.write_text(f"{before}<!-- scale -->\n{text}<!-- end -->\n{after}")
    lines = {
        title: [(row.images, statistics.median(row.seconds)) for row in rows if row.title == title]
        for title in dict.fromkeys(row.title for row in rows if not row.light)
    }
    (ROOT / "docs" / "scale.svg").write_text(
        format_curves("CPU seconds by the number of images", about, lines)
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path(".benchmark/scale"))
    parser.add_argument("--trials", type=int, default=3)
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES)
    parser.add_argument("--write", action="store_true", help="into docs/benchmarks.md and docs/scale.svg")
    options = parser.parse_args()
    about = f"{datetime.now(UTC):%Y-%m-%d}, {os.cpu_count()} cores, {platform.system()} {platform.release()}"
    print(about)
    rows = []
    for size in options.sizes:
        folder = options.folder.absolute() / str(size)
        if not folder.exists():
            write_site(folder, size)
        for name, arguments in commands(folder, size).items():
            for light in (False, True)[: 1 if name == "sweep" else 2]:
                measure(folder, *arguments, light=light)
                trials = [measure(folder, *arguments, light=light) for _ in range(options.trials)]
                seconds, peaks = zip(*trials, strict=True)
                row = Measured(name=name, light=light, images=size, seconds=seconds, peak=max(peaks))
                print(f"{size:6} {row.title:28} {row.format()}", flush=True)
                rows.append(row)
    if options.write:
        write_page(rows, about)


if __name__ == "__main__":
    main()
