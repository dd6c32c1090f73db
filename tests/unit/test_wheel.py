"""What an install brings beside the code: this tree's recipes and locks, for who has no factory."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest
from hatchling.builders.wheel import WheelBuilder

from imagefactory.errors import DISTRIBUTION
from imagefactory.settings.load import SHIPPED

ROOT = Path(__file__).parents[2]
KINDS = ("recipes", "lockfiles")
NIGHTS = ROOT / "imagefactory/shipped/nights"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    (built,) = WheelBuilder(str(ROOT)).build(directory=str(tmp_path_factory.mktemp("wheel")))
    return Path(built)


def test_the_wheel_brings_the_recipes_and_locks_of_this_tree(wheel: Path) -> None:
    """The very files, where the code looks for them, and in a checkout the same by links."""
    files = [path for kind in KINDS for path in (ROOT / kind).rglob("*") if path.is_file()]
    assert len(files) > 50
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        for path in files:
            name = path.relative_to(ROOT)
            assert (SHIPPED / name).samefile(path)
            assert archive.read(f"imagefactory/shipped/{name}") == path.read_bytes()
        for path in NIGHTS.iterdir():  # the callers are links to this repository's own
            assert archive.read(f"imagefactory/shipped/nights/{path.name}") == path.read_bytes()
            files.append(path)
    assert {path.name for path in NIGHTS.iterdir() if path.is_symlink()} == {
        *("nightly.yml", "promote.yml", "runner_hook.sh")
    }
    ours = {name for name in names if name.startswith("imagefactory/shipped/")}
    assert len(ours) == len(files), "and nothing else: no settings, whose trust would be everybody's"


def test_the_wheel_is_light_and_says_its_name(wheel: Path) -> None:
    assert wheel.name.startswith(f"{DISTRIBUTION.replace('-', '_')}-")
    assert wheel.stat().st_size < 2_400_000


def test_the_wheel_brings_every_table(wheel: Path) -> None:
    tables = {str(path.relative_to(ROOT)) for path in (ROOT / "imagefactory").rglob("*.toml")}
    assert "imagefactory/schedulers/sites.toml" in tables
    with zipfile.ZipFile(wheel) as archive:
        assert tables <= set(archive.namelist())
