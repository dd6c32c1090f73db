"""What every Python of an emulated run finds first: it waits for torch, and hides no sitecustomize of an
image's own.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from imagefactory.extras.emulate import inside

SOURCE = Path(inside.__file__).with_name("sitecustomize.py")


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder as an image is shown it, with a torch and an own sitecustomize behind it."""
    for name, text in (
        ("shown/imagefactory_emulate/__init__.py", ""),
        ("shown/imagefactory_emulate/start.py", "def install(torch, asked): print(torch.told, asked)"),
        ("own/sitecustomize.py", "print('own')"),
        ("own/torch/__init__.py", "told = 'torch'"),
        ("own/torch/part.py", "print('part')"),
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    shutil.copy(SOURCE, tmp_path / "shown")
    return tmp_path


def said(place: Path, code: str, **more: str) -> list[str]:
    environ = {
        **os.environ,
        "PYTHONPATH": f"{place}/shown:{place}/own",
        "PYTHONDONTWRITEBYTECODE": "1",
        **more,
    }
    done = subprocess.run(
        [sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=True
    )
    return done.stdout.split("\n")[:-1]


def test_torch_is_met_once_it_is_imported(place: Path) -> None:
    code = "print('begun'); import torch, torch.part; import torch"
    assert said(place, code, IMAGEFACTORY_EMULATE="asked") == ["own", "begun", "torch asked", "part"]


def test_a_program_without_torch_is_left_alone(place: Path) -> None:
    assert said(place, "import json; print('end')", IMAGEFACTORY_EMULATE="asked") == ["own", "end"]


def test_nobody_who_did_not_ask_is_shown_anything(place: Path) -> None:
    assert said(place, "import torch; print(torch.told)", IMAGEFACTORY_EMULATE="") == ["own", "torch"]
