"""What `verify` costs around the GPU suite: everything but the suite's own process, against the goal of 2 s.

    first     the layers were never scanned for GPU code
    again     what the scan found is kept in the store

The image is real and was built before (`imagefactory build TARGET`). There need be no GPU: the suite really
starts inside and finds none, and what the host says of one is made up. So no report of this is kept, and what
is printed says nothing about a GPU.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import time
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from imagefactory.actions.resolve import resolve_image
from imagefactory.actions.verify import VerifyDependencies, VerifyOptions, verify_image
from imagefactory.model import CommandResult, RunSpec
from imagefactory.oci.manifests import Image, SifArtifact
from imagefactory.progress import QuietProgress
from imagefactory.project import Project, load_project
from imagefactory.runtime.unshare import UnshareRunner
from imagefactory.settings.load import load_settings
from imagefactory.verify.report import EVIDENCE_LOCAL, QUICK, GpuIdentity, Hardware

GOAL = 2.0
NAME = "no GPU: made up by a benchmark"
UUID = "GPU-00000000-0000-0000-0000-000000000000"


class MadeUp:
    """Evidence of no GPU at all."""

    def read(self) -> Hardware:
        gpu = GpuIdentity(name=NAME, capability="8.0", uuid=UUID, memory=1 << 34)
        return Hardware(
            kind=EVIDENCE_LOCAL, driver="0.0", gpus=(gpu,), known=(UUID,), nodes=("/dev/nvidia0",)
        )


class WithoutGpu:
    """The unshare runner, asked for no GPU. `inside` sums the seconds of the command itself."""

    def __init__(self, factory: Project) -> None:
        self.runner, self.inside = UnshareRunner(factory.layout), 0.0

    def require(self) -> str:
        return self.runner.require()

    def run(self, image: Image | SifArtifact, spec: RunSpec) -> CommandResult:
        done = self.runner.run(image, replace(spec, gpus=False))
        self.inside += done.seconds
        return done


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Seconds: of the whole, and of the suite's process inside."""

    whole: float
    inside: float

    @property
    def around(self) -> float:
        return self.whole - self.inside


def measure(factory: Project, target: str) -> Measured:
    runner = WithoutGpu(factory)
    bench = VerifyDependencies(evidence=MadeUp(), clock=lambda: datetime.now(UTC), runner=runner)
    began = time.perf_counter()
    chosen = resolve_image(factory, target, "", QuietProgress())
    runner.runner.prepare(chosen.made, checked=True)
    hardware = bench.evidence.read()
    report = verify_image(factory, chosen, hardware, VerifyOptions(level=QUICK), bench, QuietProgress())
    whole = time.perf_counter() - began
    if report.outcome != "no-gpu":
        raise SystemExit(f"the suite should have found no GPU, it says {report.outcome}: {report.reason}")
    return Measured(whole=whole, inside=runner.inside)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("target", nargs="?", default="pytorch-2.3-cu121")
    parser.add_argument("--trials", type=int, default=5)
    given = parser.parse_args()
    settings = load_settings(directory=Path(__file__).parents[1], start=Path.cwd(), environ=os.environ)
    factory = load_project(settings, os.environ)
    measure(factory, given.target)  # unpacks what is not unpacked yet
    kept = factory.layout.path / "scans"
    rows: dict[str, list[Measured]] = {"first": [], "again": []}
    for _ in range(given.trials):
        shutil.rmtree(kept, ignore_errors=True)
        for name in rows:
            rows[name].append(measure(factory, given.target))
    for name, found in rows.items():
        around = statistics.median(one.around for one in found)
        inside = statistics.median(one.inside for one in found)
        part = around / GOAL
        print(
            f"{name:<6} {around:5.2f} s around the suite's process ({inside:.2f} s): {part:.2f} of the goal"
        )


if __name__ == "__main__":
    main()
