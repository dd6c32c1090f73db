"""Steps of training on an emulated GPU beside the same steps where its profile was recorded.

    .venv/bin/python benchmarks/emulated.py pytorch-2.15-cu132 --gpu A100    a verdict of the store has it
    .venv/bin/python benchmarks/emulated.py pytorch-2.15-cu132               this CPU is the device

Without a GPU the profile is that of one core of this machine, recorded now, and the emulated device is as
fast. That tries the arithmetic, not what kernels of a GPU have of their own.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path

from imagefactory.actions.definition import define_target
from imagefactory.actions.run import find_built, run_artifact
from imagefactory.actions.verdicts import VerdictReader
from imagefactory.extras.emulate.run import (
    COPIES,
    PROFILE,
    GpuRunRecord,
    emulating,
    find_recorded,
    numbers_of,
    recorded_curves,
    without_units,
)
from imagefactory.gpu.knowledge import DataSheet, find_data_sheet
from imagefactory.model import Mount, RunSpec, Target
from imagefactory.oci.manifests import Image, SifArtifact
from imagefactory.progress import QuietProgress
from imagefactory.project import Project, load_project
from imagefactory.recipes.expand import select_single
from imagefactory.settings.load import load_settings
from imagefactory.verify.gpu_run import GpuRequest, gpu_expectations
from imagefactory.verify.report import FULL
from imagefactory.verify.suite_files import read_suite, write_suite
from tests.gpu.emulated import STEPS, compare

ROOT = Path(__file__).parents[1]
STAND_IN = "T4"
"""What a CPU is called while it is emulated: as it, it has no tf32 and no bf16."""


def run_inside(factory: Project, made: Image | SifArtifact, spec: RunSpec) -> str:
    done = run_artifact(factory, made, spec, "", QuietProgress())
    if done.returncode:
        raise SystemExit(f"it ended with {done.returncode}: {(done.stderr or done.stdout)[-2000:]}")
    return done.stdout


def rehearse(
    factory: Project, target: Target, made: Image | SifArtifact, folder: Path
) -> Mapping[str, float]:
    """The check's numbers of one core of this CPU."""
    definition = define_target(factory, target)
    ask = GpuRequest(nonce="5eed", level=FULL, predicted={}, rehearsal=True)
    out = folder / "out"
    out.mkdir()
    out.chmod(0o777)
    (out / "expectations.json").write_text(json.dumps(gpu_expectations(definition, ask)))
    files = ("/out/expectations.json", "/out/report.json")
    spec = RunSpec(
        argv=("python", "-I", "-B", "/suite/verify.py", "--part", PROFILE, *files),
        environment=(("OMP_NUM_THREADS", "1"),),
        mounts=(
            Mount(source=folder / "suite", target="/suite"),
            Mount(source=out, target="/out", writable=True),
        ),
    )
    run_inside(factory, made, spec)
    (row,) = json.loads((out / "report.json").read_text())["checks"]
    if row["state"] != "passed":
        raise SystemExit(f"the rehearsal failed: {row['detail']}")
    return without_units(row["numbers"])


def of_this_cpu(numbers: Mapping[str, float]) -> GpuRunRecord:
    curves = recorded_curves(numbers)
    ways = {way: curves[f"{way.partition('-')[0]}-pageable"] for way in COPIES}
    return GpuRunRecord(
        driver="none",
        when=datetime.now(UTC),
        memory=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        processors=1,
        context=0,
        kernel=numbers["kernel"],
        launch=numbers["launch"],
        curves={**curves, **ways},
    )


def recorded_steps(
    factory: Project, made: Image | SifArtifact, sheet: DataSheet
) -> tuple[GpuRunRecord, Mapping[str, float]]:
    """Of the newest verdict in the store that can be relied on."""
    judged = VerdictReader(factory, datetime.now(UTC)).stored(made)
    found = find_recorded(judged, sheet.device)
    whose = next(
        (one.verdict for one in judged if one.verdict and found and one.verdict.issued == found.when), None
    )
    if found is None or whose is None:
        raise SystemExit(f"no verdict of this image in the store has a profile of {sheet.device}")
    return found, numbers_of(whose, PROFILE)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("target")
    parser.add_argument("--gpu", default="", help="that of a verdict, else this machine's CPU")
    asked = parser.parse_args()
    settings = load_settings(directory=ROOT, start=ROOT, environ=os.environ)
    factory = load_project(settings, os.environ)
    target = select_single(factory.targets, asked.target)
    made = find_built(factory, target, "")
    sheet, _ = find_data_sheet(asked.gpu or STAND_IN)
    with tempfile.TemporaryDirectory(prefix="emulated-") as name:
        folder = Path(name)
        write_suite(folder / "suite", read_suite())
        if asked.gpu:
            profile, recorded = recorded_steps(factory, made, sheet)
        else:
            recorded = rehearse(factory, target, made, folder)
            profile = of_this_cpu(recorded)
        kinds = sorted({name.split("-")[2] for name in recorded if name.startswith("step-")})
        argv = ("python", "-c", STEPS, "/suite", "many" if asked.gpu else "few", *kinds)
        spec = RunSpec(argv=argv, mounts=(Mount(source=folder / "suite", target="/suite"),))
        with emulating(sheet, 1, spec, profile) as (shown, _):
            emulated = json.loads(run_inside(factory, made, shown).splitlines()[-1])
    for whose, detail, _ in compare(recorded, emulated):
        print(f"{whose:18} {detail}")


if __name__ == "__main__":
    main()
