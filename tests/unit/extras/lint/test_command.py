"""The command `job check`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.made.place import Place, make_place

OLD = "executable = a.sh\r\nrequest_gpus = 1\r\nrequirements = CUDACapability >= 7.5\r\nqueue\r\n"


@pytest.fixture
def place(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    return make_place(capsys, tmp_path, monkeypatch)


def test_the_file_is_mended_and_the_difference_shown(place: Place, tmp_path: Path) -> None:
    file, inventory = tmp_path / "old.sub", tmp_path / "inventory.json"
    file.write_bytes(OLD.encode())
    file.chmod(0o750)
    gpu = {"name": "a", "gpus": [{"capability": "8.0"}]}
    inventory.write_text(json.dumps({"format": "imagefactory.inventory/1", "machines": [gpu]}))
    asked = ("job", "check", str(file), "--inventory", str(inventory))
    code, out, _ = place.call(*asked)
    assert (code, file.read_bytes()) == (0, OLD.encode())
    assert "[deprecated]" in out
    code, out, _ = place.call(*asked, "--fix")
    assert code == 0
    assert "-requirements = CUDACapability >= 7.5\n+gpus_minimum_capability = 7.5\n" in out
    assert "each matches 1 of 1 GPU" in " ".join(out.split())
    mended = OLD.replace("requirements = CUDACapability >= 7.5", "gpus_minimum_capability = 7.5")
    assert (file.read_bytes(), file.stat().st_mode & 0o777) == (mended.encode(), 0o750)
    code, out, _ = place.call(*asked, "--fix", "--json")
    assert json.loads(out)["diff"] == ""


def test_a_batch_script_is_checked_as_one(place: Place, tmp_path: Path) -> None:
    file, inventory = tmp_path / "train.sh", tmp_path / "inventory.json"
    file.write_text("#!/bin/bash\n#SBATCH --mem=16 --gres=gpu:b200:1\napptainer run a.sif\n")
    gpu = {"name": "n1", "gpus": [{"name": "a100", "capability": "8.0"}]}
    inventory.write_text(json.dumps({"format": "imagefactory.inventory/1", "machines": [gpu]}))
    asked = ("job", "check", str(file), "--inventory", str(inventory))
    code, out, _ = place.call(*asked)
    assert code == 9
    said = " ".join(out.split())
    assert f"{file}:2:9: wrong: --mem=16 is 16 MB [unit]" in said
    assert f"{file}:3:1: wrong: without --nv" in said
    assert "type b200, only a100" in said
    code, out, _ = place.call(*asked, "--json")
    document = json.loads(out)
    assert (code, document["site"], document["queues"][0]["matching"]) == (9, "slurm", 0)
    refused = place.call(*asked, "--fix")
    assert (refused.code, refused.error_codes) == (2, ("option-conflict",))
    assert "HTCondor" in refused.err
