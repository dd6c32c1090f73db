"""A factory of one's own, and what goes without one: the recipes and locks that come with the program."""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from imagefactory import __version__, errors
from imagefactory.actions import lock as stages_lock
from imagefactory.errors import UnsolvableError
from imagefactory.lock import LockRequest, OutdatedPackage, PublisherReport
from imagefactory.lock.changes import content_hash
from imagefactory.lock.files import read_lock
from imagefactory.model import Lock
from imagefactory.progress import Progress
from imagefactory.settings.load import SHIPPED
from tests.made.command import Call, say

ROOT = Path(__file__).parents[3]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder with no factory above, where the commands run."""
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


def files(root: Path) -> set[str]:
    return {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()}


# --- without one -----------------------------------------------------------------------------------


def test_what_comes_along_is_listed_and_its_locks_are_current(call: Call, here: Path) -> None:
    mine, theirs = call("list", root=None), call("list", root=ROOT)
    assert (mine.code, mine.out) == (0, theirs.out)
    said = f"the recipes of imagefactory {__version__}\nnext: "
    assert said in mine.err
    assert theirs.err.startswith("next: ")
    assert call("lock", "--check", root=None).code == 0
    shown = call("show", "pytorch-2.3-cu121", "--json", root=None).json()
    assert (shown["lock"], shown["recipe"]) == ("ok", "recipes/pytorch.yaml:32:5")
    assert list(here.iterdir()) == []


@pytest.mark.parametrize(
    "words",
    [
        "lock",
        "lock --upgrade-package torch",
        "render",
        "render --check",
        "recipe new lab",
        "recipe add-version pytorch 2.6",
        "recipe update",
    ],
)
def test_what_would_write_among_them_says_how_to_have_a_factory(call: Call, here: Path, words: str) -> None:
    before = {path: path.stat().st_mtime_ns for path in SHIPPED.glob("*/*")}
    said = call(*words.split(), root=None)
    assert said.code == errors.EXIT_USAGE
    assert said.error_codes == ("project-not-found",)
    assert "imagefactory init" in said.err
    assert {path: path.stat().st_mtime_ns for path in SHIPPED.glob("*/*")} == before
    assert list(here.iterdir()) == []


def test_what_only_prints_works_without_one(call: Call, here: Path) -> None:
    assert 'version: "2.6"' in call("recipe", "add-version", "pytorch", "2.6", "--dry-run", root=None).out
    assert "family: lab" in call("recipe", "new", "lab", "--framework", "torch", "--dry-run", root=None).out
    rendered = call("lock", "pytorch-conda-2.3-cu121", "--render", "explicit", root=None)
    assert rendered.out.startswith("# ")
    assert rendered.err.count("no imagefactory.toml") == 1


def test_trust_is_written_where_it_is_read_again(
    call: Call, here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not into the folder where one stands by chance: the file would make it a factory without recipes."""
    monkeypatch.setenv("HOME", str(tmp_path))
    assert call("key", "create", "lab", root=None).code == 0
    assert call("key", "trust", "lab", root=None).code == 0
    assert "[[trust]]" in (tmp_path / ".config/imagefactory/imagefactory.toml").read_text()
    assert list(here.iterdir()) == []


# --- making one ------------------------------------------------------------------------------------


def test_an_empty_one_is_ready_for_a_recipe(call: Call, here: Path) -> None:
    made = call("init", "lab", root=None)
    assert made.code == 0
    assert made.out.endswith("\nnext: cd lab && imagefactory recipe new pytorch --framework torch\n")
    lab = here / "lab"
    assert files(lab) == {
        "imagefactory.toml",
        *(f"recipes/{name}" for name in ("bases.yaml", "bases.schema.json", "recipe.schema.json")),
        *("lockfiles/bases/debian-12.lock", "lockfiles/bases/debian-13.lock"),
    }
    assert call("list", root=lab).code == 0
    said = call("search", root=lab)
    assert (said.code, said.error_codes) == (errors.EXIT_NOTHING_SELECTED, ("recipes-missing",))
    assert call("recipe", "new", "pytorch", "--framework", "torch", root=lab).code == 0
    assert "pytorch-" in call("list", root=lab).out
    checked = call("lock", "--check", "base:debian-12", "base:debian-13", root=lab)
    assert checked.code == 0


def test_an_empty_one_builds_on_what_comes_along(call: Call, here: Path) -> None:
    call("init", "lab", root=None)
    lab = here / "lab"
    empty = files(lab)
    printed = call("recipe", "new", "mine", "--extends", "pytorch-onnx-2.7-cu126", "--dry-run", root=lab)
    assert (printed.code, files(lab)) == (errors.EXIT_USAGE, empty)
    assert f"imagefactory init {lab} --with pytorch-onnx" in printed.err
    requirements = here / "requirements.txt"
    requirements.write_text("six\nhttps://example.org/unknown.bin\n")
    for words in (
        ("import", here / "missing.txt", "--family", "mine"),
        ("import", requirements, "--family", "No"),
        ("import", requirements, "--family", "mine", "--cuda", "12.6"),
        ("import", requirements, "--family", "mine"),
        ("new", "No"),
        ("new", "mine", "--framework", "torch"),
    ):
        said = call("recipe", *map(str, words), "--extends", "pytorch-onnx-2.7", root=lab)
        assert (said.code, files(lab)) == (errors.EXIT_USAGE, empty), words
        assert {path.name for path in lab.iterdir()} == {"imagefactory.toml", "recipes", "lockfiles"}
    made = call("recipe", "new", "mine", "--extends", "pytorch-onnx-2.7", root=lab)
    assert made.code == 0
    listed = call("list", "--json", root=lab).json()["targets"]
    assert {one["family"] for one in listed} == {"mine", "pytorch", "pytorch-onnx"}
    assert {one["lock"] for one in listed if one["family"] != "mine"} == {"ok"}
    assert (
        call("recipe", "new", "none", "--extends", "pytorch-9.9-cu126", root=lab).code
        == errors.EXIT_NOTHING_SELECTED
    )


def test_a_family_of_ones_own_is_not_replaced_by_the_one_that_comes_along(call: Call, here: Path) -> None:
    call("init", root=None)
    call("recipe", "new", "pytorch", "--framework", "torch", root=None)
    before = {path: (here / path).read_bytes() for path in files(here)}
    said = call("recipe", "new", "mine", "--extends", "pytorch-2.3-cu121", root=None)
    assert said.code == errors.EXIT_NOTHING_SELECTED
    assert {path: (here / path).read_bytes() for path in files(here)} == before


def test_families_come_with_their_locks_and_with_what_they_are_built_on(
    call: Call, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = call("init", "--with", "pytorch-onnx, jax-conda", "--json", root=None).json()
    assert made["families"] == ["jax-conda", "pytorch", "pytorch-onnx"]
    assert made["next"] == "imagefactory build pytorch-onnx-2.15-cu132"
    assert made["root"] == str(here)
    assert set(made["written"]) == files(here)
    rows = [line.split() for line in call("list", root=None).out.splitlines()[1:]]
    assert {row[-4] for row in rows} == {"ok"}
    assert call("lock", "--check", root=None).code == 0
    theirs = ("jax-conda-", "pytorch-onnx-", "pytorch-[0-9]")
    wanted = {path.name for one in theirs for path in (ROOT / "lockfiles").glob(f"{one}*")}
    assert {path.name for path in (here / "lockfiles").iterdir()} - {"bases"} == wanted


def test_nothing_that_is_there_is_overwritten(call: Call, here: Path) -> None:
    (here / "imagefactory.toml").write_text('codec = "gzip"\n')
    assert call("init", "--with", "jax", root=None).code == 0
    assert (here / "imagefactory.toml").read_text() == 'codec = "gzip"\n'
    again = call("init", "--with", "jax", root=None)
    assert (again.code, "nothing to write" in again.out) == (0, True)
    bases = here / "recipes/bases.yaml"
    bases.write_text(bases.read_text() + "# mine\n")
    assert call("init", "--with", "cupy", root=None).code == 0
    assert bases.read_text().endswith("# mine\n")
    (here / "recipes/numba.yaml").write_text("family: numba\n")
    before = files(here)
    refused = call("init", "--with", "numba", root=None)
    assert (refused.code, refused.error_codes) == (errors.EXIT_USAGE, ("file-exists",))
    assert "recipes/numba.yaml" in refused.err
    assert (files(here), (here / "recipes/numba.yaml").read_text()) == (before, "family: numba\n")


def test_a_family_that_does_not_come_along_and_a_folder_that_cannot_be(call: Call, here: Path) -> None:
    said = call("init", "lab", "--with", "pytorhc", root=None)
    assert (said.code, said.error_codes) == (errors.EXIT_NOTHING_SELECTED, ("family-unknown",))
    assert "'pytorch'" in said.err
    (here / "file").touch()
    said = call("init", "file", root=None)
    assert (said.code, said.error_codes) == (errors.EXIT_USAGE, ("cannot-write-file",))
    assert "file" in said.err
    assert list(here.iterdir()) == [here / "file"]


def test_files_that_nobody_may_write_to_make_a_factory_that_its_owner_may(
    call: Call, here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a wheel that root installed."""
    shipped = tmp_path / "shipped"
    shutil.copytree(SHIPPED, shipped)
    for path in shipped.rglob("*"):
        path.chmod(0o555 if path.is_dir() else 0o444)
    monkeypatch.setattr("imagefactory.settings.load.SHIPPED", shipped)
    monkeypatch.setattr("imagefactory.actions.new_project.SHIPPED", shipped)
    try:
        assert call("init", "--with", "numba", root=None).code == 0
        assert stat.S_IMODE((here / "recipes/numba.yaml").stat().st_mode) == 0o644
        assert os.access(here / "lockfiles", os.W_OK)
    finally:
        for path in (shipped, *shipped.rglob("*")):
            path.chmod(0o755)


# --- `add`: from a version to a row that is written, locked and rendered


@dataclass
class Locker:
    """Solves to the committed lock of torch 2.5, with another torch in it."""

    version: str
    root: Path

    def lock(self, request: LockRequest, progress: Progress) -> Lock:
        if not self.version:
            raise UnsolvableError("no-solution", "no torch", hint="change it")
        target = request.target
        held = read_lock(self.root / "lockfiles", replace(target, name="pytorch-2.5-cu124"))
        assert held
        wheels = tuple(
            replace(one, version=self.version, filename=one.filename.replace(one.version, self.version))
            if one.name == "torch"
            else one
            for one in held.wheels
        )
        decided = content_hash(target, request.base, request.under)
        return replace(held, target=target.name, content_hash=decided, wheels=wheels)

    def behind(self, request: LockRequest, lock: Lock, progress: Progress) -> tuple[OutdatedPackage, ...]:
        return ()

    def publishers(self, wheels: object, lock: Lock, progress: Progress) -> PublisherReport:
        return PublisherReport(known={}, attests=False)


Ask = Callable[..., tuple[int, str, str]]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name in ("recipes", "lockfiles"):
        shutil.copytree(ROOT / name, tmp_path / name)
    return tmp_path


@pytest.fixture
def ask(root: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Ask:
    monkeypatch.setattr(stages_lock, "target_locker", lambda *_: Locker("2.6.0", root))
    return lambda *arguments: say(capsys, "-C", str(root), *arguments)


def test_a_version_becomes_a_row_a_lock_and_a_definition(ask: Ask, root: Path) -> None:
    code, _, told = ask("recipe", "add-version", "pytorch", "2.6")
    assert code == 0
    assert told.endswith(" build pytorch-2.6-cu124\n")
    assert "note: copied from the row of 2.5" in told
    assert (
        "[torchvision==0.21.*, torchaudio==2.6.*, setuptools]" in (root / "recipes/pytorch.yaml").read_text()
    )
    assert (root / "definitions/pytorch-2.6-cu124/Dockerfile").is_file()
    assert ask("lock", "--check", "pytorch-2.6-cu124")[0] == 0
    assert ask("render", "--check", "pytorch-2.6-cu124")[0] == 0


def test_a_row_can_be_looked_at_first(ask: Ask, root: Path) -> None:
    code, out, _ = ask("recipe", "add-version", "pytorch", "2.6", "--cuda", "12.4", "--dry-run")
    assert (code, out.splitlines()[0]) == (0, '  - version: "2.6"')
    assert (root / "recipes/pytorch.yaml").read_text() == (ROOT / "recipes/pytorch.yaml").read_text()


@pytest.mark.parametrize(
    ("arguments", "code", "what"),
    [
        (("pytroch", "2.6"), 3, "'pytorch'"),
        (("nothing-like-it", "2.6"), 3, "imagefactory recipe new nothing-like-it"),
        (("pytorch", "2.6", "--cuda", "12.1"), 2, "12.4"),
        (("pytorch", "2.*"), 2, "'2.*'"),
        (("pytorch", "2.5"), 2, "2.5"),
    ],
)
def test_what_is_refused_writes_nothing(
    ask: Ask, root: Path, arguments: tuple[str, ...], code: int, what: str
) -> None:
    ended, _, told = ask("recipe", "add-version", *arguments)
    assert (ended, what in told) == (code, True), told
    assert (root / "recipes/pytorch.yaml").read_text() == (ROOT / "recipes/pytorch.yaml").read_text()


def test_a_row_that_cannot_be_locked_stays_and_is_named(
    ask: Ask, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stages_lock, "target_locker", lambda *_: Locker("", root))
    code, _, told = ask("recipe", "add-version", "pytorch", "2.6")
    assert code == 5
    assert f"{root}/recipes/pytorch.yaml" in told
    assert '"2.6"' in (root / "recipes/pytorch.yaml").read_text()


def test_a_row_without_what_its_family_promises_is_shown_so(ask: Ask, root: Path) -> None:
    with (root / "recipes/pytorch.yaml").open("a") as file:
        file.write('\n  - version: "2.6"\n    cuda: ["12.4"]\n')
    promised = "torch 2.6 without torchvision and torchaudio"
    code, _, told = ask("lock", "pytorch-2.6-cu124")
    assert (code, promised in told) == (0, True)
    assert promised in ask("list", "pytorch-*")[2]
    assert promised in ask("show", "pytorch-2.6-cu124")[1]
