"""`recipe outdated` and `recipe update`: what is newer is listed by one and written by the other."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import date
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from packaging.version import Version

from imagefactory.actions import lock as stages_lock
from imagefactory.errors import UnsolvableError
from imagefactory.extras.nightly import outdated as stages_watch
from imagefactory.lock import LockRequest, OutdatedPackage, PublisherReport
from imagefactory.lock.changes import content_hash
from imagefactory.lock.conda.explain import CudaBuild
from imagefactory.lock.files import read_lock
from imagefactory.lock.pypi.index import IndexFile
from imagefactory.lock.pypi.outdated import PypiRelease
from imagefactory.model import Lock, LockedWheel
from imagefactory.progress import Progress
from tests.made.command import Said, json_of, say

ROOT = Path(__file__).parents[4]
PAGE = ("2.15.0-cp311-cp311", "2.16.0-cp311-cp311", "2.16.0-cp313-cp313", "2.16.0-cp314-cp314")


def _anew(wheel: LockedWheel) -> LockedWheel:
    filename = wheel.filename.replace(wheel.version, "2.16.0")
    return replace(wheel, version="2.16.0", filename=filename)


@dataclass
class Index:
    """Solves each target to its committed lock with `moved` another version; refuses those of `refused`, and
    what has no lock, unless it `can` solve 2.16 as 2.15."""

    root: Path
    moved: str = "filelock"
    refused: str = "nothing"
    can: bool = False
    cuda: str = "13.3.1"
    attested: dict[str, str] = field(default_factory=dict)

    def lock(self, request: LockRequest, progress: Progress) -> Lock:
        if self.refused in request.target.name:
            raise UnsolvableError(
                "packages-conflict", f"{request.target.name}: no such torch", hint="change it"
            )
        target, series = request.target, request.target.version
        like = replace(target, name="pytorch-2.15-cu132", version="2.15", cuda="13.2")
        held = read_lock(self.root / "lockfiles", like if series == "2.16" and self.can else target)
        if held is None:
            raise UnsolvableError("packages-conflict", f"{target.name}: nobody has it", hint="wait")
        wheels = tuple(
            replace(one, version="99", filename=one.filename.replace(one.version, "99"), sha256="9" * 64)
            if one.name == self.moved
            else one
            for one in held.wheels
        )
        if series == "2.16":
            wheels = tuple(_anew(one) if one.name == "torch" else one for one in wheels)
        decided = content_hash(request.target, request.base, request.under)
        return replace(held, target=target.name, content_hash=decided, wheels=wheels)

    def behind(self, request: LockRequest, lock: Lock, progress: Progress) -> tuple[OutdatedPackage, ...]:
        return ()

    def publishers(self, wheels: Sequence[LockedWheel], lock: Lock, progress: Progress) -> PublisherReport:
        return PublisherReport(known=self.attested, attests=True)

    def listed(self, wheels: Sequence[LockedWheel], lock: Lock) -> dict[LockedWheel, tuple[IndexFile, ...]]:
        assert [wheel.name for wheel in wheels] == ["torch"]
        names = [f"torch-{one}-manylinux_2_28_x86_64.whl" for one in PAGE]
        return {
            wheels[0]: tuple(IndexFile(filename=n, url="", sha256="", uploaded="2026-11-02") for n in names)
        }

    def metadata(self, pin: str, lock: Lock) -> str:
        assert pin in ("torch==2.16.0", "torch==2.15.0")
        head = "Metadata-Version: 2.1\nName: torch\nVersion: 2.16.0\n"
        return f"{head}Requires-Dist: cuda-toolkit=={self.cuda}\n"


HELD = next(
    line.partition("==")[2].split()[0]
    for line in (ROOT / "lockfiles/pytorch-2.3-cu121.requirements.txt").read_text().splitlines()
    if line.startswith("filelock==")
)
Ask = Callable[..., Said]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name in ("recipes", "lockfiles", "definitions"):
        shutil.copytree(ROOT / name, tmp_path / name)
    return tmp_path


@pytest.fixture
def index(root: Path, monkeypatch: pytest.MonkeyPatch) -> Index:
    made = Index(ROOT)
    monkeypatch.setattr(stages_lock, "target_locker", lambda *_: made)
    monkeypatch.setattr(stages_watch, "uv_locker", lambda *_: made)
    monkeypatch.setattr(stages_watch, "conda_locker", lambda _: SimpleNamespace(builds=lambda *_: ()))
    monkeypatch.setenv("IMAGEFACTORY_STORE", str(root / "store"))
    return made


@pytest.fixture
def ask(root: Path, index: Index, capsys: pytest.CaptureFixture[str]) -> Ask:
    def ask(*arguments: str, command: str = "outdated") -> Said:
        return say(capsys, "-C", str(root), "recipe", command, "-q", *arguments)

    return ask


def texts(root: Path) -> dict[str, bytes]:
    return {str(p.relative_to(root)): p.read_bytes() for p in root.rglob("*") if p.is_file()}


def test_what_is_new_is_told_and_nothing_changes(ask: Ask, root: Path) -> None:
    before = texts(root)
    code, out, _ = ask("pytorch")
    assert code == 0
    assert "torch 2.16, since 2026-11-02, now 2.16.0, for Python 3.11 and 3.13" in out
    assert "to have it: imagefactory recipe add-version pytorch 2.16 --cuda 13.3" in out
    assert "torch 2.16.0 has wheels for Python 3.14, which no row uses; no base carries it yet" in out
    assert f"filelock {HELD} -> 99" in out
    assert texts(root) == before


def test_what_is_written_is_whole_and_its_message_says_why(ask: Ask, root: Path) -> None:
    """A release that cannot be locked leaves no row behind, and the code says it."""
    before = texts(root)
    code, out, told = ask("pytorch", command="update")
    subject, blank, why = out.split("\n")[:3]
    assert (code, subject, blank) == (5, "Re-lock pytorch: filelock", "")
    assert "pytorch-2.16-cu133: nobody has it" in told
    assert why.startswith("A re-solve")
    assert f"  filelock {HELD} -> 99\n" in out
    assert "    imagefactory recipe add-version pytorch 2.16 --cuda 13.3\n" in out
    assert max(map(len, out.split("\n"))) <= 80
    assert "lock" in told
    after = texts(root)
    changed = {name for name in before if before[name] != after[name]}
    assert before.keys() == after.keys()
    assert {name.split("/")[0] for name in changed} == {"lockfiles", "definitions"}
    families = {name.split("/")[1].split("-2.")[0] for name in changed}
    assert families == {"pytorch", "pytorch-onnx", "workbench"}  # which is built on it, and would be stale
    assert ask("pytorch-onnx", command="update")[:2] == (
        5,
        "",
    )  # the same unit, and a second time nothing is left


def test_a_changed_publisher_is_in_the_message(ask: Ask, root: Path, index: Index) -> None:
    for path in (root / "lockfiles").glob("*.requirements.txt"):
        lines = path.read_text().splitlines()
        lines = [
            f"{line} by GitHub a/b c.yml" if line.startswith("# wheel: filelock-") else line for line in lines
        ]
        path.write_text("\n".join([*lines, ""]))
    index.attested = {"filelock": "GitHub a/fork c.yml"}
    code, out, _ = ask("pytorch", "--json", command="update")
    (row,) = json.loads(out)["results"]
    changes = [change for lock in row["locks"] for change in lock["changes"]]
    change = {"name": "filelock", "before": "GitHub a/b c.yml", "after": "GitHub a/fork c.yml"}
    assert (code, [row["publisher"] for row in changes]) == (5, [change] * len(changes))
    assert "GitHub a/fork c.yml" in row["message"]


def test_a_release_gets_its_row_lock_and_definition(ask: Ask, root: Path, index: Index) -> None:
    index.can, index.cuda, before = True, "13.2.0", texts(root)
    code, out, _ = ask("pytorch", command="update")
    assert (code, out.split("\n")[0]) == (0, "Add 2.16 to pytorch, and re-lock it")
    assert "\n2.16: without torchvision:" in out
    assert "  torch 2.16, since 2026-11-02, now 2.16.0, for Python 3.11 and 3.13\n" in out
    assert "Not in here" not in out
    new = {name for name in texts(root) if name not in before}
    assert {name.split("/")[1] for name in new} == {
        "pytorch-2.16-cu132",
        "pytorch-2.16-cu132.requirements.txt",
    }
    assert '- version: "2.16"' in (root / "recipes/pytorch.yaml").read_text()
    index.moved = "nothing"
    assert ask("pytorch")[1].count("release") == 0


def test_what_cannot_be_solved_is_told_and_hides_nothing_else(ask: Ask, root: Path, index: Index) -> None:
    index.refused = "pytorch-2.5"
    code, out, told = ask("pytorch")
    assert code == 5
    assert "pytorch-2.5-cu124: no such torch" in told
    assert "pytorch-2.3-cu121" in out
    index.refused = "conda"
    code, out, _ = ask("jax-conda")
    assert (code, out.split("\n")[0]) == (5, "jax-conda: nothing new in what could be solved")


def build(version: str, cuda: str, python: str) -> CudaBuild:
    day = date(2026, 6, 1)
    return CudaBuild(release=PypiRelease(version=Version(version), uploaded=day), cuda=cuda, python=python)


def test_of_a_conda_family_releases_cudas_and_pythons_are_told(
    ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its newest row is 0.7 with CUDA 12.9 on Python 3.11; rows of others have 3.12."""
    builds = (
        build("0.7.2", "12.9", "3.11"),
        build("0.7.2", "13.0", "3.11"),
        build("0.7.2", "13.1", "3.13"),  # a Python of no row
        build("0.8.1", "12.9", "3.12"),
        build("0.9.0", "12.9", "3.14"),
    )
    channels = SimpleNamespace(builds=lambda *_: builds)
    monkeypatch.setattr(stages_watch, "conda_locker", lambda _: channels)
    (news,) = json_of(ask("jax-conda", "--json"), "recipe-outdated")["results"]
    assert [(one["series"], one["release"], one["pythons"]) for one in news["releases"]] == [
        ("0.8", "0.8.1", ["3.12"])
    ]
    assert [(one["series"], one["cuda"], one["command"]) for one in news["cudas"]] == [("0.7", "13.0", "")]
    assert (news["python"]["release"], news["python"]["python"]) == ("0.9.0", "3.14")


def test_a_cuda_of_the_newest_row_that_no_row_has_is_told(
    ask: Ask, root: Path, index: Index, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the extras of what is locked, where the tables know of none."""
    said = (
        "Metadata-Version: 2.1\nName: torch\nVersion: 2.15.0\nProvides-Extra: cuda14\nProvides-Extra: opt\n"
    )
    monkeypatch.setattr(Index, "metadata", lambda *_: said)
    out = ask("pytorch")[1]
    assert "torch 2.15 has builds for CUDA 14, which no row has" in out
    assert "to have it: imagefactory recipe add-version pytorch 2.15 --cuda 14" in out


def test_a_lock_stays_where_what_is_built_on_it_cannot_follow(ask: Ask, root: Path, index: Index) -> None:
    index.refused = "pytorch-onnx-2.5"
    before = texts(root)
    assert ask("pytorch", command="update")[0] == 5
    after = texts(root)
    changed = [name for name in before if before[name] != after[name] and name.startswith("lockfiles/")]
    assert not any("2.5-cu124" in name for name in changed)
    assert any("2.7-cu126" in name for name in changed)


def test_a_workflow_gets_a_job_for_what_changes_alone(ask: Ask, index: Index) -> None:
    code, out, told = ask("pytorch", "--github")
    assert code == 0
    assert out == 'families={"include":[{"family":"pytorch","branch":"relock/pytorch"}]}\n'
    assert "filelock" in told
    index.moved = "nothing"
    assert ask("jax-conda", "--github")[1] == 'families={"include":[]}\n'


def test_as_json_it_holds_the_message(ask: Any) -> None:
    said = ask("pytorch", "--json")
    assert said[2] == ""
    (news,) = json_of(said, "recipe-outdated")["results"]
    assert news["releases"][0]["command"] == "imagefactory recipe add-version pytorch 2.16 --cuda 13.3"
    (change,) = news["locks"][0]["changes"]
    assert change == {"name": "filelock", "before": HELD, "after": "99", "publisher": None}
    assert news["message"].startswith("Re-lock pytorch")
    assert news["written"] == []
    assert json.dumps(news)


def test_a_name_that_is_no_family_is_refused(ask: Ask) -> None:
    said = ask("pytorhc")
    assert (said.code, said.error_codes) == (3, ("target-unknown",))
    assert "'pytorch'" in said.err
    assert ask("pytorch", "--github", "--json")[0] == 2
