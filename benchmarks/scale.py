"""What a site of many images costs its users: CPU seconds and peak memory of whole commands, by size.

    search         every image on all GPUs of an inventory; the best 20 are shown
    search words   the same for one framework and version
    job write      a job file, with all verdicts of its image
    light          the same where the signatures are checked without a compiled library

The verdicts are made up, and all signatures are real. CPU seconds are those of the process (user and system),
so other work on the machine counts less. One run before the first trial fills the cache.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from imagefactory.trust.catalog import LIFE, sign_catalog
from tests.made.catalog import make_catalog
from tests.made.report import format_key_row, many_images
from tests.made.verdicts import LAB, LAB_TRUSTED

SIZES = (100, 1_000, 10_000)
GPUS_AN_IMAGE, GPUS_A_MACHINE = 3, 8
MODELS = (("7.0", "Tesla V100-SXM2-32GB", 32), ("8.0", "NVIDIA A100-SXM4-80GB", 80))
MODELS += (("8.9", "NVIDIA L40S", 46), ("9.0", "NVIDIA H100 80GB HBM3", 80), ("12.0", "Made RTX", 96))
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
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path(".benchmark/scale"))
    parser.add_argument("--trials", type=int, default=3)
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES)
    options = parser.parse_args()
    print(f"{datetime.now(UTC):%Y-%m-%d}, {os.cpu_count()} cores, {platform.system()} {platform.release()}")
    for size in options.sizes:
        folder = options.folder.absolute() / str(size)
        if not folder.exists():
            write_site(folder, size)
        for name, arguments in commands(folder, size).items():
            for light in (False, True):
                measure(folder, *arguments, light=light)
                trials = [measure(folder, *arguments, light=light) for _ in range(options.trials)]
                seconds = statistics.median(cpu for cpu, _ in trials)
                spread = f"{min(trials)[0]:.2f} to {max(trials)[0]:.2f}"
                row = f"{size:6} {name:13} {'light' if light else '':6} {seconds:6.2f} s ({spread})"
                print(row, f"{max(peak for _, peak in trials) >> 20:4} MB", flush=True)


if __name__ == "__main__":
    main()
