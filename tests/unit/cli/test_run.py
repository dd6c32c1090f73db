"""`imagefactory run`: which image a name means, what it sees, what its limits become and how they end it."""

from __future__ import annotations

from pathlib import Path

import pytest

from imagefactory.actions import run
from imagefactory.actions.run import WORKDIR
from imagefactory.model import CommandResult, ContainerStart, Mount, RunSpec
from imagefactory.oci.layout import Layout
from imagefactory.oci.manifests import Image
from imagefactory.verify.evidence import LocalEvidence
from tests.made.command import Call
from tests.made.layout import add_image
from tests.made.verdicts import HOST_OF_TWO


@pytest.mark.parametrize(
    ("ended", "said"),
    [
        ({"timed_out": True}, "time=2s"),
        ({"over": ("too much", "ask for more")}, "too much"),
    ],
)
def test_a_run_that_reached_a_limit(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ended: dict[str, object], said: str
) -> None:
    asked: list[RunSpec] = []

    def end(_: object, __: object, spec: RunSpec, *___: object) -> CommandResult:
        asked.append(spec)
        return CommandResult(returncode=137, stdout="", stderr="", seconds=2.0, **ended)  # type: ignore[arg-type]

    monkeypatch.setattr(run, "run_artifact", end)
    add_image(Layout(tmp_path / "store"), "pytorch:2.3-cu121", [b"one"])
    limits = ["--limit", "time=2s,memory=1K", "--limit", "files=none"]
    result = call("run", *limits, "pytorch-2.3-cu121", "--", "true")
    assert (result.code, result.error_codes) == (137, ("limit-reached",))
    assert said in result.err
    assert (asked[0].timeout, asked[0].limits) == (2, (("memory", 1024), ("files", None)))


def test_a_limit_that_cannot_be(call: Call, tmp_path: Path) -> None:
    add_image(Layout(tmp_path / "store"), "pytorch:2.3-cu121", [b"one"])
    result = call("run", "--limit", "memory=much", "pytorch-2.3-cu121", "--", "true")
    assert result.code == 2
    assert "memory=16G" in result.err


def test_selected_gpus(
    call: Call, tmp_path: Path, ran: list[tuple[Image, RunSpec]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LocalEvidence, "read", lambda _: HOST_OF_TWO)
    add_image(Layout(tmp_path / "store"), "pytorch:2.3-cu121", [b"one"])
    first, second = (gpu.uuid for gpu in HOST_OF_TWO.gpus)

    def start(*options: str) -> RunSpec:
        assert call("run", *options, "pytorch-2.3-cu121", "--", "true").code == 3
        return ran.pop()[1]

    both = start("--gpus", f"1,{first}")
    assert both.gpus
    assert both.selected_gpus == ((1, second, ""), (0, first, ""))
    assert both.environment == (("CUDA_VISIBLE_DEVICES", f"{second},{first}"),)
    own = start("--gpus", "0", "-e", "CUDA_VISIBLE_DEVICES=", "-e", "A=b")
    assert own.environment == (("CUDA_VISIBLE_DEVICES", ""), ("A", "b"))
    for options in (("--gpus", "all"), ("--nv",)):
        every = start(*options)
        assert (every.gpus, every.selected_gpus, every.environment) == (True, (), ())
    wrong = call("run", "--gpus", "2", "pytorch-2.3-cu121", "--", "true")
    assert (wrong.code, wrong.error_codes) == (2, ("gpu-not-selectable",))
    assert f"0 ({first}), 1 ({second})" in wrong.err
    conflict = call("run", "--nv", "--gpus", "0", "pytorch-2.3-cu121", "--", "true")
    assert (conflict.code, conflict.error_codes) == (2, ("option-conflict",))


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Image, RunSpec]]:
    """What would have run, and in which image."""
    asked: list[tuple[Image, RunSpec]] = []

    def end(_: object, image: Image, spec: RunSpec, *__: object) -> CommandResult:
        asked.append((image, spec))
        return CommandResult(returncode=3, stdout="", stderr="", seconds=0.0)

    monkeypatch.setattr(run, "run_artifact", end)
    return asked


def test_any_image_of_the_store_runs_by_target_tag_or_digest(
    call: Call, tmp_path: Path, ran: list[tuple[Image, RunSpec]]
) -> None:
    layout = Layout(tmp_path / "store")
    ours = add_image(layout, "pytorch:2.3-cu121", [b"one"]).digest
    other = add_image(layout, "registry.example.org/lab/other:1.0", [b"two"]).digest
    (tmp_path / "empty").mkdir()
    for name, root in (
        ("pytorch-2.3-cu121", None),
        ("pytorch:2.3-cu121", tmp_path / "empty"),
        (ours, tmp_path / "empty"),
        (f"pytorch-2.3-cu121@{ours}", tmp_path / "empty"),
    ):
        assert call("run", name, "--", "true", **({"root": root} if root else {})).code == 3
    assert call("run", "registry.example.org/lab/other:1.0", "--", "true", root=tmp_path / "empty").code == 3
    assert [image.digest for image, _ in ran] == [ours] * 4 + [other]
    for name, hint in (
        ("registry.example.org/lab/none:1", "imagefactory pull registry.example.org/lab/none:1"),
        ("none:1", "imagefactory image list"),
        (f"sha256:{'0' * 64}", "imagefactory image list"),
    ):
        said = call("run", name, "--", "true")
        assert (said.code, hint in said.err) == (3, True)


def test_the_current_folder_is_there_to_read(
    call: Call, tmp_path: Path, ran: list[tuple[Image, RunSpec]], monkeypatch: pytest.MonkeyPatch
) -> None:
    add_image(Layout(tmp_path / "store"), "pytorch:2.3-cu121", [b"one"])
    project, home = tmp_path / "project", tmp_path / "home"
    project.mkdir()
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(project)
    said = call("run", "pytorch-2.3-cu121", "--", "python", "train.py")
    assert f"{project} is /work inside, read-only; to write there: --mount .:/work:rw" in said.err
    assert call("run", "-q", "pytorch-2.3-cu121", "--", "true").err == ""
    for options in (("--mount", ".:/data:rw"), ("--mount", ".:/data:bind"), ("--workdir", "/opt")):
        assert call("run", *options, "pytorch-2.3-cu121", "--", "true").err == ""
    assert [(spec.mounts, spec.workdir) for _, spec in ran] == [
        ((Mount(source=project, target="/work"),), "/work"),
        ((Mount(source=project, target="/work"),), "/work"),
        ((Mount(source=project, target="/data", writable=True),), "/"),
        ((Mount(source=project, target="/data", bind=True),), "/"),
        ((), "/opt"),
    ]
    (home / ".ssh").mkdir()
    (tmp_path / "runtime/tmux").mkdir(parents=True)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "runtime"))
    for folder, why in (
        (home, "is your home"),
        (tmp_path, f"contains {home}"),
        (tmp_path / "store", "imagefactory itself"),
        (home / ".ssh", "hidden"),
        (tmp_path / "runtime/tmux", "running programs"),
        (Path("/"), "contains"),
        (Path("/etc"), "system directory"),
        (Path("/dev"), "system directory"),
        (Path("/tmp"), "/tmp"),
    ):
        monkeypatch.chdir(folder)
        said = call("run", "pytorch-2.3-cu121", "--", "true")
        assert why in said.err
        assert (ran[-1][1].mounts, ran[-1][1].workdir) == ((), "/")
    assert call("run", "--mount", ".:/data:plain", "pytorch-2.3-cu121", "--", "true").code == 2


def test_without_a_command_the_recipes_own_starts_in_the_folder_here(
    call: Call, tmp_path: Path, ran: list[tuple[Image, RunSpec]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder of the recipe's own goes before; a user whom no sandbox has is told."""
    add_image(Layout(tmp_path / "store"), "pytorch:2.3-cu121", [b"one"])
    for start in (ContainerStart(command=("jupyter", "lab"), user="1000"), ContainerStart(command=("a",))):
        monkeypatch.setattr(run, "own_start", lambda *_, said=start: said)
        assert call("run", "pytorch-2.3-cu121").code == 3
        spec = ran[-1][1]
        assert (spec.argv, spec.workdir, spec.uid) == (start.command, WORKDIR, int(start.user or 0))
    monkeypatch.setattr(
        run, "own_start", lambda *_: ContainerStart(command=("a",), workdir="/app", user="100000")
    )
    assert call("run", "--user", "7", "pytorch-2.3-cu121").code == 3
    assert (ran[-1][1].workdir, ran[-1][1].uid) == ("/app", 7)
    said = call("run", "pytorch-2.3-cu121")
    assert (said.code, said.error_codes) == (2, ("user-not-supported",))
    assert "user 100000" in said.err
