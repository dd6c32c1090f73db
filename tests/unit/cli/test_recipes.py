"""The commands that go on with the recipes that have no fault, and say which have one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from imagefactory.errors import RecipeError
from tests.made.place import Place, make_place

BAD = "family: bad\n"
ON = "family: above\ndescription: Above\non: {on}\npackages: [extra]\n"


@pytest.fixture
def place(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    place = make_place(capsys, tmp_path, monkeypatch)
    place.call("lock", "tiny-*")
    (place.root / "recipes/bad.yaml").write_text(BAD)
    return place


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (("list",), "tiny-2.3-cu121  pytorch 2.3"),
        (("lock", "*"), "tiny-2.3-cu121: unchanged"),
        (("render",), "wrote tiny-2.3-cu121"),
    ],
)
def test_the_others_go_on(place: Place, command: tuple[str, ...], said: str) -> None:
    code, out, told = place.call(*command)
    assert code == 2
    assert said in out
    assert "recipes/bad.yaml:1:1: 'description' is missing" in told
    code, out, _ = place.call(*command, "--json")
    (error,) = json.loads(out)["errors"]
    assert (code, error["exit_code"], "recipes/bad.yaml" in error["message"]) == (2, 2, True)


def test_a_build_goes_on(place: Place) -> None:
    code, _, told = place.call("build", "*", "--strict-base", "--no-test")
    assert code == 2
    assert told.startswith("error: recipes/bad.yaml:1:1")
    assert "tiny-2.3-cu121" in told  # whose packages no server has


def test_what_is_of_a_recipe_with_faults_is_no_unknown_name(place: Place) -> None:
    code, _, told = place.call("lock", "bad-1.0-cu12")
    assert code == 2
    assert "recipes/bad.yaml:1:1" in told


def test_what_may_be_of_a_recipe_with_faults_is_no_orphan(place: Place) -> None:
    (place.root / "lockfiles/bad-1.0-cu12.requirements.txt").write_text("")
    faulty = place.call("lock", "--check")
    assert (faulty.code, "lock-orphaned" in faulty.error_codes) == (2, False)
    (place.root / "recipes/bad.yaml").unlink()
    gone = place.call("lock", "--check")
    assert "lock-orphaned" in gone.error_codes
    assert "lockfiles/bad-1.0-cu12" in gone.err


def test_what_is_built_on_a_recipe_with_faults_waits_for_it(place: Place) -> None:
    (place.root / "recipes/above.yaml").write_text(ON.format(on="bad-1.0-cu12"))
    (place.root / "recipes/more.yaml").write_text(ON.format(on="above-1.0-cu12").replace("above\n", "more\n"))
    code, out, told = place.call("list")
    assert (code, len(out.splitlines())) == (2, 2)
    assert "recipes/above.yaml:3:5: the recipe of 'bad-1.0-cu12' has problems (fix bad.yaml)" in told
    assert "recipes/more.yaml:3:5: the recipe of 'above-1.0-cu12' has problems (fix above.yaml)" in told


def test_faults_that_only_the_other_files_show(place: Place) -> None:
    """A CUDA version that the framework does not come with is seen when all is read."""
    good = (place.root / "recipes/tiny.yaml").read_text()
    (place.root / "recipes/bad.yaml").write_text(
        good.replace("family: tiny", "family: bad").replace("debian-12", "debian-0")
    )
    code, out, told = place.call("list")
    assert (code, "tiny-2.3-cu121" in out, "bad-2.3-cu121" in out) == (2, True, False)
    assert "recipes/bad.yaml:7:7: " in told
    assert "'debian-0'" in told


def test_other_commands_stop(place: Place) -> None:
    """A catalog or a table without a family would say that it is gone."""
    code, out, told = place.call("plan")
    assert (code, out) == (2, "")
    assert "recipes/bad.yaml:1:1" in told
    with pytest.raises(RecipeError):
        _ = place.factory
