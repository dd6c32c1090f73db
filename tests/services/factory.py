"""The command line on a store of its own, and what spares it the base: made once a run, lent to all files."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from imagefactory.oci.layout import Layout
from tests.made.documents import check_printed
from tests.services.once import once

ROOT = Path(__file__).parents[2]
COMMAND = (sys.executable, "-m", "imagefactory")


@dataclass(frozen=True, kw_only=True)
class Factory:
    """One store and cache, and the command line on them."""

    store: Path
    cache: Path
    root: Path = ROOT
    extra: Mapping[str, str] = field(default_factory=dict)

    @property
    def environ(self) -> dict[str, str]:
        mine = {"IMAGEFACTORY_STORE": str(self.store), "IMAGEFACTORY_CACHE": str(self.cache)}
        return {**os.environ, **mine, **self.extra}

    def command(self, *arguments: str) -> list[str]:
        return [*COMMAND, "-C", str(self.root), *arguments]

    def run(self, *arguments: str, code: int | None = 0) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            self.command(*arguments), env=self.environ, capture_output=True, text=True, timeout=1500
        )
        if code is not None:
            assert done.returncode == code, f"{arguments}: {done.returncode}\n{done.stdout}\n{done.stderr}"
        check_printed(done.stdout)
        return done

    def build(self, target: str, *options: str) -> dict[str, Any]:
        """The JSON result of a build that passes its smoke test."""
        result = json.loads(self.run("build", "--json", *options, target).stdout)
        assert result["format"] == "imagefactory.build/1"
        assert result["errors"] == []
        (built,) = result["results"]
        assert isinstance(built, dict)
        return built


TINY_RECIPE = """\
family: tiny
description: The CUDA runtime and two small packages, for tests of interruptions
source: pypi
framework: nvidia-cuda-runtime-cu12
platform: linux/amd64
base: debian-12
python: "3.11"
capabilities: ["8.0"]
checks: [packages, libraries]
packages: ["idna==3.7", "markupsafe==2.1.5"]
matrix:
  - version: "12.1"
    cuda: ["12.1"]
"""


SMALL_BASES = """\
bases:
  - name: debian-12
    suite: bookworm
    python: "3.11"
    glibc: "2.36"
    packages: [ca-certificates, python3, python3-venv, tini]
    public: docker.io/library/debian:12-slim
"""
"""The base without compilers and headers: a third of its bytes. Most tests try the way, not the base."""


def make_root(root: Path, bases_of: Path = ROOT, /, **recipes: str) -> Path:
    """A factory's root with recipes, and the bases of another with their locks."""
    (root / "recipes").mkdir(parents=True)
    (root / "imagefactory.toml").write_text("")
    shutil.copy(bases_of / "recipes" / "bases.yaml", root / "recipes")
    (root / "lockfiles" / "bases").mkdir(parents=True)
    for lock in (bases_of / "lockfiles" / "bases").glob("debian-1?.lock"):  # none of arm64
        shutil.copy(lock, root / "lockfiles" / "bases")
    for family, text in recipes.items():
        (root / "recipes" / f"{family}.yaml").write_text(text)
    return root


def make_base_store(folder: Path) -> None:
    """In `folder`: a store of the project's own base alone; a cache with its .debs."""
    _make_store(folder, make_root(folder / "tiny", tiny=TINY_RECIPE))


def make_small_store(folder: Path) -> None:
    """The same of the small base. `folder`/tiny is the tiny target's factory, locked."""
    bases = folder / "bases"
    (bases / "recipes").mkdir(parents=True)
    (bases / "recipes/bases.yaml").write_text(SMALL_BASES)
    (bases / "lockfiles/bases").mkdir(parents=True)
    _make_store(folder, make_root(folder / "tiny", bases, tiny=TINY_RECIPE), "base:debian-12")


def _make_store(folder: Path, root: Path, *locked: str) -> None:
    maker = Factory(store=folder / "store", cache=folder / "cache", root=root)
    maker.run("lock", *locked, "tiny-12.1-cu121")
    maker.build("tiny-12.1-cu121", "--no-test")
    maker.run("image", "remove", "tiny:12.1-cu121")
    maker.run("image", "prune")
    assert list(Layout(maker.store).tags()) == ["base:debian-12"]


@pytest.fixture(scope="session")
def base_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store that holds the base and nothing else, of the whole run: it is lent (`lend`, `copy_store`)."""
    return once(tmp_path_factory, "base", make_base_store) / "store"


@pytest.fixture(scope="session")
def small_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same of the small base, which the targets of `tiny_root` stand on."""
    return once(tmp_path_factory, "small-base", make_small_store) / "store"


@pytest.fixture(scope="session")
def tiny_root(small_store: Path) -> Path:
    """A factory of one small target on the small base, locked; to be read only."""
    return small_store.with_name("tiny")


def copy_store(store: Path, path: Path) -> Path:
    """A store of its own at `path`, of links: a store replaces its files and never writes into them."""
    subprocess.run(["cp", "--archive", "--link", "--no-target-directory", store, path], check=True)
    for locks in (path / "locks", path / "unpacked" / ".locks"):
        for lock in locks.iterdir():
            lock.unlink()
    return path


def lend(base_store: Path, folder: Path) -> Factory:
    """A factory of its own in `folder`, which spares it the base."""
    (folder / "cache").mkdir(parents=True)
    (folder / "cache" / "debs").symlink_to(base_store.parent / "cache" / "debs")
    return Factory(store=copy_store(base_store, folder / "store"), cache=folder / "cache")
