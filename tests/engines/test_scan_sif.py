"""A .sif that apptainer made is looked into, without root and without a trace."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.made.gpu_code import library
from tests.made.scanned import VERSION
from tests.services.children import stdout_of

ROOT = Path(__file__).parents[2]


def test_a_sif_is_unpacked_and_told(apptainer: str, tmp_path: Path) -> None:
    site = tmp_path / "root/opt/env/lib/python3.11/site-packages"
    for path, data in {
        "torch/lib/libtorch_cuda.so": library(("sm_70", "sm_80"), ("sm_70", "sm_80")),
        "torch/version.py": VERSION,
        "torch-2.3.1.dist-info/METADATA": b"Name: torch\n",
    }.items():
        (site / path).parent.mkdir(parents=True, exist_ok=True)
        (site / path).write_bytes(data)
    (tmp_path / "root/bin").mkdir()
    subprocess.run([apptainer, "build", str(tmp_path / "x.sif"), str(tmp_path / "root")], check=True)
    environ = {**os.environ, "IMAGEFACTORY_STORE": str(tmp_path / "store")}
    argv = [
        sys.executable,
        "-m",
        "imagefactory",
        "-C",
        str(tmp_path),
        "compat",
        "--json",
        str(tmp_path / "x.sif"),
    ]
    output = stdout_of(argv, env=environ, cwd=ROOT)
    value = json.loads(output)
    assert value["source"] == "scan of the unpacked .sif"
    assert (value["framework_version"], value["cuda"]) == ("2.3.1", "12.1")
    (found,) = value["libraries"]
    assert found["path"] == "opt/env/lib/python3.11/site-packages/torch/lib/libtorch_cuda.so"
    assert found["modules"] == [{"count": 2, "codes": ["sm_70", "sm_80"]}]
    assert list((tmp_path / "store" / "tmp").iterdir()) == []
