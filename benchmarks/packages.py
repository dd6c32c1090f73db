"""Measure `compat PACKAGE==VERSION --gpu NAME` on the package index: answer, bytes, seconds, peak memory.

Every package is measured by a fresh process with an empty cache, then by another one from the cache.
Writes benchmarks/packages.md.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = (
    "flash-attn==2.8.3",
    "xformers==0.0.31",
    "vllm==0.11.0",
    "sglang==0.5.5",
    "deepspeed==0.18.2",
    "mamba-ssm==2.2.4",
    "ctranslate2==4.6.0",
    "xgboost==3.1.1",
    "lightgbm==4.6.0",
    "cudf-cu12==25.10.0",
    "cuml-cu12==25.10.0",
    "dgl==2.1.0",
    "torch-scatter==2.1.2",
    "torchao==0.14.0",
    "tensorrt-cu12==10.13.3.9",
    "nvidia-dali-cuda120==1.51.2",
    "transformer-engine-cu12==2.8.0",
    "llama-cpp-python==0.3.16",
    "spconv-cu120==2.3.6",
    "numba-cuda[cu12]==0.20.0",
    "jax[cuda12]==0.8.0",
    "pyg-lib==0.4.0",
    "kornia-rs==0.1.9",
    "torchvision==0.24.0",
    "pylibraft-cu12==25.10.0",
    "cuquantum-cu12==25.9.1",
    "lightning==2.5.6",
    "lmdeploy==0.10.2",
    "catboost==1.2.8",
    "transformers[torch]==4.57.1",
    "tensorflow[and-cuda]==2.20.0",
    "exllamav2==0.3.2",
    "open3d==0.19.0",
    "taichi==1.7.4",
    "nvidia-cudnn-cu12==9.10.2.21",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lookup:
    """One lookup. `memory` is the peak of the process in MB."""

    package: str
    answer: str
    reason: str
    read: str
    seconds: float
    memory: float


def ask(package: str, gpu: str, cache: str) -> Lookup:
    """Return what one process of its own answered, read and needed."""
    command = [sys.executable, "-m", "imagefactory", "compat", package, "--gpu", gpu, "--json"]
    environment = {**os.environ, "IMAGEFACTORY_CACHE": cache}
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as messages:
        began = time.monotonic()
        process = subprocess.Popen(command, stdout=out, stderr=messages, cwd=cache, env=environment)
        _, _, usage = os.wait4(process.pid, 0)
        seconds = time.monotonic() - began
        for file in (out, messages):
            file.seek(0)
        value, text = json.load(out), messages.read()
    if "errors" in value:
        answer, reason = f"`{value['errors'][0]['code']}`", value["errors"][0]["message"]
    elif "scan" in value["format"]:
        answer, reason = value["gpus"][0]["answer"], value["gpus"][0]["reason"]
    else:
        answer, reason = "`table`", "a table knows it"
    read = re.search(r"read (\S+ \S+) of (\S+ \S+) in", text)
    return Lookup(
        package=package,
        answer=answer,
        reason=reason,
        read=f"{read[1]} of {read[2]}" if read else "nothing",
        seconds=seconds,
        memory=usage.ru_maxrss / 1000,
    )


def measure(package: str, gpu: str) -> tuple[Lookup, Lookup]:
    """Measure with an empty cache, then from the cache."""
    with tempfile.TemporaryDirectory() as folder:
        return ask(package, gpu, folder), ask(package, gpu, folder)


HEAD = """# `compat` of packages without a table row

[packages.py](packages.py) writes this table. *Seconds* are those of the first question with an empty cache,
*again* those of the second one. *Memory* is the peak of the process. {day}, {cores} cores, for {gpu}.

| package | answer | read | seconds | again | memory | reason |
|---|---|---|---|---|---|---|
"""


def table_row(lookups: tuple[Lookup, Lookup]) -> str:
    first, again = lookups
    return (
        f"| {first.package} | {first.answer} | {first.read} | {first.seconds:.0f} | {again.seconds:.1f} "
        f"| {first.memory:.0f} MB | {first.reason[:110].replace('|', '/')} |\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gpu", default="RTX 5070 Ti")
    parser.add_argument("packages", nargs="*", default=PACKAGES)
    options = parser.parse_args()
    text = HEAD.format(day=time.strftime("%Y-%m-%d"), cores=os.cpu_count(), gpu=options.gpu)
    for package in options.packages:
        row = table_row(measure(package, options.gpu))
        print(row, end="", flush=True)
        text += row
    (ROOT / "benchmarks/packages.md").write_text(text)


if __name__ == "__main__":
    main()
