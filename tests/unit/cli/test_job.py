"""The command `job write`, for Kubernetes and after an emulated run."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.made.emulated import TOLD
from tests.made.joined import join_site, person_at

NAME = "pytorch-2.3-cu121"


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ((), ("gpus_minimum_memory = 1GB", "request_cpus = 4", "retry_request_memory = 9GB")),
        (("--cpus", "2"), ("gpus_minimum_memory = 1GB", "request_cpus = 2")),
        (("--cpus", "1"), ("gpus_minimum_memory = 1GB", "request_cpus = 1")),
        (("--gpu-memory", "24GB"), ("gpus_minimum_memory = 24GB", "request_cpus = 4")),
    ],
)
def test_memory_and_cores(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    options: tuple[str, ...],
    expected: tuple[str, ...],
) -> None:
    call = person_at(capsys, tmp_path, monkeypatch)
    join_site(tmp_path)
    Path("told.json").write_text(json.dumps(TOLD))
    call("job", "write", NAME, "--resources-from", "told.json", *options)
    assert set(expected) <= set(Path(f"{NAME}.sub").read_text().splitlines())
    assert call("job", "check", f"{NAME}.sub").out.endswith("no errors\n")
    call("job", "write", NAME, "--resources-from", "told.json", "--memory", "4GB", "--force")
    assert "retry_request_memory" not in Path(f"{NAME}.sub").read_text()


@pytest.mark.parametrize(
    ("changes", "code", "said"),
    [
        ({"memory": {**TOLD["memory"], "exceeded": True}}, 2, "A100-SXM4-40GB"),
        ({"basis": "verified"}, 9, "told.json: basis"),
    ],
)
def test_a_run_that_no_job_can_follow(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    changes: dict[str, Any],
    code: int,
    said: str,
) -> None:
    call = person_at(capsys, tmp_path, monkeypatch)
    join_site(tmp_path)
    Path("told.json").write_text(json.dumps({**TOLD, **changes}))
    done = call("job", "write", NAME, "--resources-from", "told.json", code=code)
    assert said in done.err
    assert (done.error_codes == ("gpu-memory-too-small",)) == (code == 2)
    assert not Path(f"{NAME}.sub").exists()


def test_the_time_of_a_run_that_ended(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = person_at(capsys, tmp_path, monkeypatch)
    join_site(tmp_path)
    Path("told.json").write_text(json.dumps({**TOLD, "ended": True, "seconds": 3000.0, "busy": 1000.0}))
    words = (
        "job",
        "write",
        NAME,
        "--executable",
        "train.sh",
        "--site",
        "slurm",
        "--resources-from",
        "told.json",
    )
    Path("train.sh").write_text("#!/bin/sh\n")
    Path("train.sh").chmod(0o755)
    call(*words)
    assert "#SBATCH --time=0-01:28:00" in Path(f"{NAME}.sbatch").read_text()
    call(*words, "--time", "3h", "--force")
    assert "#SBATCH --time=0-03:00:00" in Path(f"{NAME}.sbatch").read_text()


def test_a_job_for_pyxis_by_option_or_setting(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = person_at(capsys, tmp_path, monkeypatch)
    join_site(tmp_path)
    words = ("job", "write", NAME, "--site", "slurm")
    call(*words, "--container", "pyxis")
    script = Path(f"{NAME}.sbatch")
    assert "image='docker://" in script.read_text()
    call(*words, "--force")
    assert "apptainer exec" in script.read_text()
    monkeypatch.setenv("IMAGEFACTORY_CONTAINER", "pyxis")
    call(*words, "--force")
    assert "image='docker://" in script.read_text()
    assert call(*words, "--image-format", "oras", code=2).error_codes == ("image-type-unsupported",)
    call(*words, "--container", "edf", "--force")
    edf = Path(f"{NAME}.toml")
    assert f'--environment="$SLURM_SUBMIT_DIR"/{edf}' in script.read_text()
    assert "@sha256:" in tomllib.loads(edf.read_text())["image"]
    said = call("job", "write", NAME, "--site", "generic", "--container", "pyxis", code=2)
    assert said.error_codes == ("option-conflict",)
    monkeypatch.setenv("IMAGEFACTORY_CONTAINER", "docker")
    assert call(*words, code=2).error_codes == ("setting-invalid",)


def test_of_several_gpus_it_is_told_whether_a_verdict_speaks(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = person_at(capsys, tmp_path, monkeypatch)
    join_site(tmp_path)
    Path("told.json").write_text(json.dumps({**TOLD, "ranks": 2}))
    said = call("job", "write", NAME, "--resources-from", "told.json")
    assert "  GPUs   2 of one machine work together: not verified" in said.out


def test_a_job_for_kubernetes(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    person = person_at(capsys, tmp_path, monkeypatch)
    join_site(tmp_path)
    Path("train.py").write_text("#!/usr/bin/env python3\n")
    Path("values.csv").write_text("lr\n0.1\n0.2\n")
    asked = ("job", "write", "pytorch-2.5", "--site", "kubernetes", "--executable", "train.py")
    asked += ("--params", "values.csv")
    said = person(*asked)
    assert said.out.startswith("wrote pytorch-2.5-cu124.yaml\n")
    assert "next: kubectl create -f pytorch-2.5-cu124.yaml" in said.err
    files, job = yaml.safe_load_all(Path("pytorch-2.5-cu124.yaml").read_text())
    assert 'exec ./train.py --lr "${value_lr[run]}"' in files["data"]["imagefactory-run.sh"]
    assert job["spec"]["completions"] == 2
    assert "-o NAME.yaml" in person(*asked, code=2).err
    said = person(*asked, "-o", "a.sub", code=2)
    assert (said.error_codes, "-o train.yaml" in said.err) == (("option-invalid",), True)
    said = person("job", "write", "pytorch-2.5", "--site", "kubernetes", "--image-format", "sif", code=2)
    assert "--image-format docker" in said.err
    said = person("job", "write", "pytorch-2.5", "--site", "kubernetes", "--inventory", "x", code=2)
    assert (said.error_codes, "--inventory" in said.err) == (("option-conflict",), True)
