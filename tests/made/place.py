"""A factory with one conda family, and the channel that it asks."""

from __future__ import annotations

import json
import re
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from imagefactory.project import Project, load_project
from imagefactory.settings.load import load_settings
from tests.made.command import Call, say
from tests.made.values import hexed

RECIPE = """\
family: tiny
description: A small framework from conda
source: conda
framework: pytorch
channels: ["{channel}"]
python: "3.11"
base: debian-12
platform: linux/amd64
capabilities: ["8.0"]
matrix:
  - version: "2.3"
    cuda: ["12.1"]
    packages: [{packages}]
    constraints: ["pytorch * *cuda*"]
"""
RECORDS = (
    ("python 3.11.9 h0_0_cpython", ()),
    ("python 3.12.4 h0_0_cpython", ()),
    ("numpy 1.26.4 py311h0_0", ("python >=3.11,<3.12.0a0",)),
    ("pytorch 2.3.1 cuda121_py311_0", ("python >=3.11,<3.12.0a0", "numpy", "cuda-version 12.1.*", "__cuda")),
    ("pytorch 2.3.1 cpu_py311_1", ("python >=3.11,<3.12.0a0", "numpy")),
    ("cuda-version 12.1 h0_0", ()),
    ("extra 1.0 h0_0", ("numpy",)),
)


@dataclass(frozen=True)
class Place:
    """A factory with one conda family, and the channel that it asks."""

    root: Path
    call: Call

    def ask(self, packages: str = '"numpy <2"') -> None:
        """Writes the recipe."""
        text = RECIPE.format(channel=(self.root / "channel").as_uri(), packages=packages)
        (self.root / "recipes" / "tiny.yaml").write_text(text)

    def offer(self, *more: tuple[str, tuple[str, ...]], young: str = "") -> None:
        """Writes the channel's records; `young` was uploaded two days ago, the others in 2023."""
        now = int(time.time() * 1000)
        packages = {}
        for spec, depends in (*RECORDS, *more):
            name, version, build = spec.split()
            filename = f"{name}-{version}-{build}.conda"
            packages[filename] = {
                "name": name,
                "version": version,
                "build": build,
                "build_number": int((re.findall(r"_([0-9]+)", build) or ["0"])[-1]),
                "depends": list(depends),
                "sha256": hexed(filename),
                "md5": hexed(filename, "md5"),
                "size": 1000,
                "subdir": "linux-64",
                "timestamp": now - 2 * 86_400_000 if spec == young else 1_700_000_000_000,
            }
        for subdir, held in (("linux-64", packages), ("noarch", {})):
            folder = self.root / "channel" / subdir
            folder.mkdir(parents=True, exist_ok=True)
            data = {"info": {"subdir": subdir}, "packages": {}, "packages.conda": held}
            (folder / "repodata.json").write_text(json.dumps(data))

    @property
    def factory(self) -> Project:
        return load_project(load_settings(directory=self.root, start=self.root, environ={}), {})

    def names(self) -> list[str]:
        return sorted(path.name for path in (self.root / "lockfiles").iterdir())

    def states(self) -> dict[str, str]:
        _, out, _ = self.call("list", "--json")
        return {row["target"]: row["lock"] for row in json.loads(out)["targets"]}


def make_place(capsys: pytest.CaptureFixture[str], folder: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    monkeypatch.setenv("IMAGEFACTORY_STORE", str(folder / "store"))
    monkeypatch.setenv("IMAGEFACTORY_CACHE", str(folder / "cache"))
    root = folder / "root"
    (root / "recipes").mkdir(parents=True)
    shutil.copy(Path(__file__).parents[2] / "recipes" / "bases.yaml", root / "recipes")
    made = Place(root=root, call=lambda *arguments: say(capsys, "-C", str(root), *arguments))
    made.ask()
    made.offer()
    return made
