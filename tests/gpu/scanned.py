"""What `compat` says of a Python's frameworks, by tables and by a scan: PYTHON CAPABILITY DRIVER OUTPUT.

In a process of its own. It writes JSON: `frameworks` by distribution, and `libraries` with GPU code by path,
each with its number of modules and of those that should load. It needs the packages packaging and PyYAML.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from imagefactory.gpu.capability import Capability, parse_capability  # noqa: E402
from imagefactory.gpu.frameworks import cpu_only, frameworks  # noqa: E402
from imagefactory.gpu.knowledge.tables import covers  # noqa: E402
from imagefactory.gpu.predict import predict, runs  # noqa: E402
from imagefactory.gpu.values import ScanResult, SupportLevel  # noqa: E402
from imagefactory.matrix.compat import CompatGpu, exact_releases, rows, serves  # noqa: E402
from imagefactory.progress import QUIET  # noqa: E402
from imagefactory.scan.files import scan_directory  # noqa: E402
from imagefactory.suite import table  # noqa: E402
from imagefactory.verify.gpu_run import RUNS, predict_coverage  # noqa: E402

# The files of each distribution, by PEP 503 name, relative to the directory that is scanned.
FILES = """
import importlib.metadata as m, json, re, sys, sysconfig
site = sysconfig.get_path("purelib")
every = {}
for d in m.distributions(path=[site]):
    name = re.sub(r"[-_.]+", "-", d.metadata["Name"] or "").lower()
    every[name] = [d.version, [f.as_posix() for f in d.files or ()]]
json.dump([site, every], sys.stdout)
"""
SHARED = ("nvidia-", "cuda-", "triton")
"""Beginnings of the names of distributions that several frameworks load."""


def own(dist: str, installed: Mapping[str, Any]) -> set[str]:
    """The distributions that make up a framework, as in an image that has no other."""
    packages = next((row.packages for row in frameworks() if dist in row.packages), (dist,))
    stems = tuple(f"{name}-" for name in {dist.partition("-cuda")[0], dist.removesuffix("-gpu")})
    return {
        name for name in installed if name in packages or name.startswith((*stems, *SHARED)) or name == dist
    }


def contents_of(dist: str, scan: ScanResult, installed: Mapping[str, Any]) -> ScanResult:
    names = own(dist, installed)
    files = {file for name in names for file in installed[name][1]}
    return replace(
        scan,
        source=dist,
        libraries=tuple(library for library in scan.libraries if library.path in files),
        packages=tuple(package for package in scan.packages if package.name in names),
        facts=tuple(fact for fact in scan.facts if fact[0] in (dist, table.FRAMEWORKS[dist])),
    )


def of_tables(dist: str, version: str, cuda: str, gpu: CompatGpu) -> list[dict[str, Any]]:
    """What `compat DIST==VERSION --capability X.Y --driver D` says, for the CUDA version here."""
    every = rows(exact_releases(f"{dist}=={version}"), (gpu,))
    fitting = [
        row
        for row in every
        if not cuda or covers(row.candidate.question.cuda, cuda) or covers(cuda, row.candidate.question.cuda)
    ]
    return [
        {
            "title": row.candidate.title,
            "runs": serves(row.cells[0]) if row.cells[0].claims else None,
            "answer": row.cells[0].answer,
            "claims": [f"{claim.basis} {claim.answer}: {claim.reason}" for claim in row.cells[0].claims],
        }
        for row in fitting or every
    ]


def of_framework(
    dist: str, scan: ScanResult, installed: Mapping[str, Any], capability: Capability, driver: str
) -> dict[str, Any]:
    contents, version = contents_of(dist, scan, installed), installed[dist][0]
    runtime = (v for name, (v, _) in sorted(installed.items()) if name.startswith("nvidia-cuda-runtime"))
    cuda = ".".join(next(runtime, "").split(".")[:2])
    gpu = CompatGpu(name=str(capability), capability=capability, driver=driver)
    prediction = predict(contents, capability, driver)
    coverage = predict_coverage(contents, [capability])[str(capability)]
    return {
        "cpu": cpu_only(contents),
        "driver": driver,
        "tables": of_tables(dist, version, cuda, gpu),
        "scan": {
            "runs": prediction.answer in RUNS,
            "answer": prediction.answer,
            "reason": prediction.reason,
        },
        "predicted": {str(capability): asdict(coverage)},
    }


def main(python: str, text: str, driver: str, output: str) -> int:
    done = subprocess.run([python, "-I", "-c", FILES], capture_output=True, text=True, check=True)
    site, installed = json.loads(done.stdout)
    capability = parse_capability(text)
    scan = scan_directory(Path(site), QUIET, workers=os.cpu_count() or 1)
    found = {
        "site": site,
        "frameworks": {
            dist: of_framework(dist, scan, installed, capability, driver)
            for dist in table.FRAMEWORKS
            if dist in installed
        },
        "libraries": {
            library.path: [
                sum(modules.count for modules in library.modules),
                sum(
                    modules.count
                    for modules in library.modules
                    if any(
                        runs(code, capability) in (SupportLevel.NATIVE, SupportLevel.PTX)
                        for code in modules.codes
                    )
                ),
            ]
            for library in scan.libraries
            if library.modules
        },
    }
    Path(output).write_text(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
