"""A GPU day's run in an image, rehearsed: pieces, a verdict on the stand-in, a registry, a job file."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest

from imagefactory.project import Project
from tests.gpu import image
from tests.services import libcuda
from tests.services.gpu_factory import NAME

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def folder(factory: Project, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pieces of the tiny image and nothing else; `here` beside it is what `pack` makes them of.

    Both are below a project, as build/gpu-day is.
    """
    root = tmp_path_factory.mktemp("day")
    here, there = root / "here", root / "there"
    there.mkdir()
    (root / "imagefactory.toml").write_text("")
    shutil.copytree(factory.settings.root.value, here / image.PROJECT)
    shutil.copytree(factory.layout.path, here / image.STORE)
    (here / image.STORE / "unpacked").mkdir(exist_ok=True)
    (here / image.STORE / "unpacked/large").write_bytes(os.urandom(1 << 20))
    (here / image.SITE).mkdir()
    rows = image.split(here, NAME, 4_000_000)
    assert len(rows) > 1
    assert max(path.stat().st_size for path in here.glob("piece-*")) == 4_000_000
    for path in here.glob("piece*"):
        shutil.copy(path, there)
    return there


def step(*words: str | Path, code: int) -> tuple[Any, dict[str, dict[str, Any]]]:
    """The report of a step and its rows by name."""
    command = [sys.executable, "-B", "-m", "tests.gpu.image", *map(str, words)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == code, done.stderr
    output = Path(words[words.index("--output") + 1])
    document = json.loads((output / "report.json").read_text())
    return document, {row["name"]: row for row in document["rows"]}


def test_a_rehearsal_reaches_a_job_file_and_keeps_nothing(
    folder: Path, registry: str, tmp_path: Path
) -> None:
    driver = tmp_path / "driver"
    here, brought, end = folder.with_name("here"), tmp_path / "brought", tmp_path / "end"
    before = image.names_of(here / image.STORE)
    document, rows = step("run", "--folder", folder, "--output", brought, "--stand-in", driver, code=0)
    assert (document["outcome"], document["rehearsal"]) == (image.REHEARSED, True)
    assert {row["state"] for row in rows.values()} == {"passed"}
    assert libcuda.NAME in rows["verdict list"]["detail"]
    assert not list(brought.rglob("*.pem"))

    document, rows = step("read", brought, "--folder", here, "--output", end, code=0)
    assert (document["outcome"], document["rehearsal"]) == (image.REHEARSED, True)
    (job,) = end.glob("*.sub")
    (digest,) = json.loads((here / image.STORE / "index.json").read_text())["manifests"]
    assert digest["digest"].partition(":")[2] in job.read_text()
    assert image.names_of(here / image.STORE) == before
    assert not list(here.glob("gpu-day-*"))
    assert {path.name for path in brought.iterdir()} == {"report.json", "report.md"}


def test_a_lie_of_the_driver_moves_no_tag(folder: Path, tmp_path: Path) -> None:
    driver = libcuda.build_libcuda(tmp_path / "driver", "kernel=wrong").parent
    document, rows = step("run", "--folder", folder, "--output", tmp_path, "--stand-in", driver, code=1)
    assert document["outcome"] == "failed"
    assert rows[f"verify {NAME}"]["state"] == rows["image promote"]["state"] == "failed"


def test_a_piece_that_was_not_carried_or_is_damaged_is_named(folder: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    (copy / "piece-00").unlink()
    (copy / "piece-01").write_bytes(b"x")
    with pytest.raises(SystemExit, match=r"piece-00 piece-01 first"):
        image.run(copy, tmp_path, None)


def test_only_packages_that_the_requirements_pin_travel() -> None:
    lines = "".join(image.requirements(ROOT / "requirements/build.txt"))
    names = {line.partition("==")[0] for line in lines.splitlines() if "==" in line.partition(" ")[0]}
    assert names == set(image.PACKAGES)
    assert lines.count("--hash=sha256:") > len(names)


@pytest.mark.parametrize("name", ["../outside", "/etc/outside", "link"])
def test_what_came_back_stays_in_the_store(tmp_path: Path, name: str) -> None:
    with tarfile.open(tmp_path / image.NEW, "w") as archive:
        member = tarfile.TarInfo(name)
        member.type = tarfile.SYMTYPE if name == "link" else tarfile.REGTYPE
        archive.addfile(member)
    with pytest.raises(SystemExit, match=name):
        list(image.files_of(tmp_path / image.NEW))
