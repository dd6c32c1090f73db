"""`add`: from a version to a row that is written, locked and rendered."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from imagefactory.actions import lock as stages_lock
from imagefactory.errors import UnsolvableError
from imagefactory.lock import LockRequest, OutdatedPackage
from imagefactory.lock.content_hash import content_hash
from imagefactory.lock.files import read_lock
from imagefactory.model import Lock
from imagefactory.progress import Progress
from tests.made.command import say

ROOT = Path(__file__).parents[3]


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
    assert "note: as in the row of 2.5" in told
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
