"""The steps of release.yml that make wheel and sdist, run on a copy of this tree, and the use of both."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from imagefactory import __version__
from tests.services import uv

ROOT = Path(__file__).parents[2]
STEPS = yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text())["jobs"]["build"]["steps"]
COMMIT = "0123456789abcdef0123456789abcdef01234567"


def copy_tree(target: Path) -> None:
    """Copy what git would check out, with changes that are not committed."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_symlink() or (ROOT / name).exists():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name, follow_symlinks=False)


def run(*command: str | Path, cwd: Path, code: int = 0) -> str:
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=300)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of wheel and sdist."""
    tree = tmp_path_factory.mktemp("release")
    copy_tree(tree)
    (tree / ".venv").symlink_to(Path(sys.prefix))
    environ = {
        **os.environ,
        "GITHUB_REF_NAME": f"v{__version__}",
        "GITHUB_SERVER_URL": "https://github.com",
        "GITHUB_REPOSITORY": "lab/imagefactory",
        "GITHUB_SHA": COMMIT,
    }
    steps = [step["run"] for step in STEPS if "run" in step]
    first = next(place for place, text in enumerate(steps) if "GITHUB_REF_NAME" in text)
    for text in steps[first:]:
        done = subprocess.run(
            ["bash", "-e", "-c", text], cwd=tree, env=environ, capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, text + done.stdout + done.stderr
    return tree / "dist"


def test_the_index_accepts_both(dist: Path) -> None:
    assert sorted(path.suffix for path in dist.iterdir()) == [".gz", ".whl"]
    run(sys.executable, "-m", "twine", "check", "--strict", *sorted(dist.iterdir()), cwd=dist)


def test_the_sdist_gives_the_same_wheel(dist: Path, tmp_path: Path) -> None:
    run("tar", "-xf", next(dist.glob("*.tar.gz")), cwd=tmp_path)
    (source,) = tmp_path.iterdir()
    run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", tmp_path / "wheel", cwd=source)
    (wheel,) = dist.glob("*.whl")
    assert (tmp_path / "wheel" / wheel.name).read_bytes() == wheel.read_bytes()


def test_the_wheel_works_without_this_tree(dist: Path, tmp_path: Path) -> None:
    """The light install: it reads bundled recipes and tables, and starts a project pinned to the release."""
    run(sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv", cwd=tmp_path)
    (wheel,) = dist.glob("*.whl")
    uv.install("--python", tmp_path / "venv/bin/python", wheel)
    program = tmp_path / "venv/bin/imagefactory"
    assert run(program, "--version", cwd=tmp_path) == f"imagefactory {__version__}\n"
    answer = json.loads(run(program, "compat", "pytorch-2.3-cu121", "--gpu", "T4", "--json", cwd=tmp_path))
    assert [cell["answer"] for row in answer["rows"] for cell in row["cells"]] == ["yes"]
    run(program, "init", "lab", "--github", cwd=tmp_path)
    nightly = (tmp_path / "lab/.github/workflows/nightly.yml").read_text()
    assert set(re.findall(r"uses: lab/imagefactory/\S+@(\S+)", nightly)) == {COMMIT}
