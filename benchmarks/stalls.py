"""Data stalls of a training on a GPU that is not there: by the loader's workers, and by the page cache.

    .venv/bin/python benchmarks/stalls.py --folder .benchmark pytorch-2.15-cu132

The loader, its files, its processes and the disk are this machine's; the GPUs are emulated. Writes
docs/stalls.svg and prints its numbers. After figures 3 to 6 of Mohan et al., Analyzing and Mitigating Data
Stalls in DNN Training (2021).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from html import escape
from pathlib import Path

from imagefactory.extras.emulate.run import stall_share
from imagefactory.jobs.resources import parse_emulated

ROOT = Path(__file__).parents[1]
GPUS = ("T4", "A100-SXM4-40GB")
WORKERS, SHARES = (1, 2, 3, 4), (0, 25, 50, 75, 100)
LEFT, TOP, WIDE, HIGH, BESIDE = 60, 64, 300, 180, 90
COLOURS = ("#0b6e4f", "#1d4ed8")
STYLE = """svg{font:13px system-ui,-apple-system,"Segoe UI",Roboto,"DejaVu Sans",sans-serif}
.bg{fill:#fff}text{fill:#1b2127}.d{fill:#525d68;font-size:11px}.b{font-weight:700}.g{stroke:#d5dae0}"""

Line = tuple[str, list[tuple[int, float]]]


def measure(target: str, folder: Path, gpu: str, *words: str) -> float:
    """The share of a batch's time that such a training waits for it, in percent."""
    told = folder / "told.json"
    command = [sys.executable, "-m", "imagefactory", "-C", str(ROOT), "emulate", gpu]
    command += ["--output", str(told), "--mount", f"{ROOT / 'benchmarks'}:/b", "--mount", f"{folder}:/d:rw"]
    command += ["--workdir", "/d", target, "--", "python", "/b/train_images.py", "/d/pictures", *words]
    subprocess.run(command, check=True, capture_output=True)
    loader = parse_emulated(told.read_text(), str(told)).loader
    share = None if loader is None else stall_share(loader)
    if share is None:
        raise SystemExit(f"{gpu} {words}: no loader was seen")
    return round(100 * share, 1)


def format_picture(panels: Sequence[tuple[str, str, list[Line]]], says: str) -> str:
    """An SVG of panels side by side: percent by a number, a line for each GPU."""
    width, height = LEFT + len(panels) * (WIDE + BESIDE), TOP + HIGH + 56
    parts = [f'<text class="b" x="16" y="24">{escape(says)}</text>']
    for place, (title, below, lines) in enumerate(panels):
        x0 = LEFT + place * (WIDE + BESIDE)
        numbers = [number for number, _ in lines[0][1]]
        parts.append(f'<text class="d" x="{x0}" y="{TOP - 16}">{escape(title)}</text>')
        for percent in (0, 25, 50, 75, 100):
            y = TOP + HIGH * (100 - percent) / 100
            parts.append(f'<line class="g" x1="{x0}" x2="{x0 + WIDE}" y1="{y:g}" y2="{y:g}"/>')
            parts.append(f'<text class="d" x="{x0 - 8}" y="{y + 4:g}" text-anchor="end">{percent} %</text>')
        span = max(numbers) - min(numbers)
        at = {number: x0 + WIDE * (number - min(numbers)) / span for number in numbers}
        for number in numbers:
            middle = f'x="{at[number]:g}" y="{TOP + HIGH + 18}" text-anchor="middle"'
            parts.append(f'<text class="d" {middle}>{number}</text>')
        parts.append(f'<text class="d" x="{x0}" y="{TOP + HIGH + 38}">{escape(below)}</text>')
        for (gpu, found), colour in zip(lines, COLOURS, strict=True):
            points = [(at[number], TOP + HIGH * (100 - share) / 100) for number, share in found]
            path = " ".join(f"{x:g},{y:.1f}" for x, y in points)
            parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
            parts += [f'<circle cx="{x:g}" cy="{y:.1f}" r="3.5" fill="{colour}"/>' for x, y in points]
            name = gpu.partition("-")[0]
            (x, y) = points[-1]
            parts.append(f'<text x="{x + 8:g}" y="{y + 4:.1f}" style="fill:{colour}">{name}</text>')
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" role="img" aria-label="{escape(says)}">\n<title>{escape(says)}</title>\n'
        f'<style>\n{STYLE}\n</style>\n<rect class="bg" width="{width}" height="{height}" rx="8"/>\n'
    )
    return head + "\n".join(parts) + "\n</svg>\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("target", help="a built target with torch and torchvision")
    parser.add_argument(
        "--folder", type=Path, required=True, help="for the pictures, on the disk in question"
    )
    asked = parser.parse_args()
    folder = asked.folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    decode, read = [], []
    for gpu in GPUS:
        by_workers = [(count, measure(asked.target, folder, gpu, str(count), "decode")) for count in WORKERS]
        by_cache = [(share, measure(asked.target, folder, gpu, "1", "read", str(share))) for share in SHARES]
        decode.append((gpu, by_workers))
        read.append((gpu, by_cache))
        print(json.dumps({"gpu": gpu, "workers": by_workers, "cached": by_cache}), flush=True)
    panels = [
        ("JPEG files, decoded and cropped", "workers of the loader", decode),
        ("decoded files, one worker", "percent of them in the page cache", read),
    ]
    cores = len(os.sched_getaffinity(0))
    says = f"Time that ResNet-50 waits for its data, on {cores} cores and GPUs that are not there (emulated)"
    (ROOT / "docs" / "stalls.svg").write_text(format_picture(panels, says))


if __name__ == "__main__":
    main()
