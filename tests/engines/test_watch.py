"""`recipe outdated` against the package index this machine is set to (network)."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

from tests.services.children import stdout_of

ROOT = Path(__file__).parents[2]


def test_a_family_whose_rows_are_old_is_told_the_releases_since(tmp_path: Path) -> None:
    for name in ("recipes", "lockfiles"):
        shutil.copytree(ROOT / name, tmp_path / name)
    recipe = tmp_path / "recipes/numba.yaml"
    old = recipe.read_text().replace('"0.68"', '"0.66"')
    recipe.write_text(old.replace("cu12]==0.30.*", "cu12]==0.29.*").replace("cu13]==0.30.*", "cu13]==0.29.*"))
    for cuda in ("cu12", "cu13"):
        lock = tmp_path / f"lockfiles/numba-0.68-{cuda}.requirements.txt"
        lock.rename(tmp_path / f"lockfiles/numba-0.66-{cuda}.requirements.txt")
    command = [sys.executable, "-m", "imagefactory", "-C", tmp_path, "recipe", "outdated", "numba", "--json"]
    output = stdout_of(command, timeout=120, cwd=ROOT)
    (news,) = json.loads(output)["results"]
    assert [one["series"] for one in news["releases"]][:2] == ["0.67", "0.68"]
    assert news["releases"][0]["command"] == "imagefactory recipe add-version numba 0.67 --cuda 13"
    assert all(one["since"] > "2026" for one in news["releases"][:2])
    moved = {move["name"]: move["after"] for lock in news["locks"] for move in lock["changes"]}
    assert moved["numba"].startswith("0.66.")
    assert not (tmp_path / "definitions").exists()
