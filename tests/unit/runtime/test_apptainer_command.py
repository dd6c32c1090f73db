"""What apptainer's machine is asked, by programs that stand where unshare would."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from imagefactory.errors import BuildError
from imagefactory.runtime import apptainer_command
from imagefactory.runtime.apptainer_command import ApptainerCommand, SifRequest
from tests.made.programs import Program, calls


@pytest.fixture
def command(programs: Path, monkeypatch: pytest.MonkeyPatch) -> ApptainerCommand:
    monkeypatch.setattr(apptainer_command, "SYSTEM_PATH", str(programs))
    return ApptainerCommand({"PATH": str(programs)})


def test_a_user_namespace_is_asked_for_as_an_ordinary_user_gets_one(
    command: ApptainerCommand, program: Program, tmp_path: Path
) -> None:
    program("unshare")
    assert command._user_namespaces() == ""
    ((_, *words),) = calls(tmp_path)
    assert words == ["unshare", "--user", "--map-root-user", "true"]


def test_why_there_is_no_user_namespace(command: ApptainerCommand, program: Program) -> None:
    program("unshare", fails="unshare: Operation not permitted\n", code=1)
    assert command._user_namespaces() == "unshare: Operation not permitted"


def test_without_unshare_apptainer_says_it_itself(command: ApptainerCommand) -> None:
    assert command._user_namespaces() == ""


def test_an_unshare_that_never_answers_is_told_in_words(
    command: ApptainerCommand, program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    program("unshare")

    def hang(*_: object, **__: object) -> None:
        raise subprocess.TimeoutExpired("unshare", 60)

    monkeypatch.setattr(subprocess, "run", hang)
    assert "did not answer within a minute" in command._user_namespaces()


def test_a_line_without_end_is_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "child.py"
    program.write_text("import sys\nfor _ in range(64): sys.stdout.write('x' * (1 << 16))\nsys.exit(1)\n")
    monkeypatch.setattr(apptainer_command, "CHILD", program)
    request = SifRequest(folder=tmp_path, spec="", output=tmp_path / "new.sif")
    call = apptainer_command._SpythonCall(request=request, sif=tmp_path / "new", program="", environment={})
    lines: list[str] = []
    with pytest.raises(BuildError):
        call.run(lines.append)
    assert len(lines) == 64
