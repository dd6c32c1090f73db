"""The command `night` without a night: its options, its units, and what changed since a plan."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from imagefactory.extras.nightly import command
from imagefactory.model import Target
from imagefactory.project import Project
from tests.made.command import Call, json_of
from tests.made.factory import NAME
from tests.made.pushed import push, put_base, put_built
from tests.made.registry import RegistryMadeHere


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        (("--wait-limit", "3h"), ("--wait-limit", "--scheduler")),
        (("--github",), ("--github", "--kept")),
        (("--kept", "x", "--github", "--json"), ("--github", "--json")),
        (("--kept", "x", "pytorch-*"), ("--kept", "pytorch-*")),
        (("--kept", "x", "--mail", "true"), ("--kept", "--mail")),
        (("--kept", "x", "--metrics", "y"), ("--kept", "--metrics")),
    ],
)
def test_what_does_not_go_together_is_refused(
    call: Call, argv: tuple[str, ...], named: tuple[str, str]
) -> None:
    done = call("site", "nightly", *argv)
    assert (done.code, done.error_codes) == (2, ("option-conflict",))
    assert all(word in done.err for word in named)


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (("--webhook", "http://chat.example.org/x"), "https://"),
        (("--kept", "nothing.json"), "nothing.json"),
        ((), "registry = "),
    ],
)
def test_what_cannot_be_used_is_refused(call: Call, argv: tuple[str, ...], said: str) -> None:
    done = call("site", "nightly", *argv)
    assert (done.code, said in done.err) == (2, True), done


def test_units_are_written_and_two_commands_told(call: Call, tmp_path: Path) -> None:
    folder = tmp_path / "systemd" / "user"
    argv = (
        "site",
        "nightly",
        "pytorch-*",
        "--scheduler",
        "htcondor",
        "--wait-limit",
        "3h",
        "--mail",
        "mail me",
        "--install",
    )
    said = call(*argv, str(folder), root=tmp_path)
    assert said.code == 0
    assert "systemctl --user enable --now imagefactory-night.timer" in said.out
    assert "loginctl enable-linger" in said.out
    service = (folder / "imagefactory-night.service").read_text()
    assert (
        f'-C {tmp_path} site nightly --scheduler htcondor --wait-limit 10800s --mail "mail me" "pytorch-*"\n'
        in service
    )
    assert (folder / "imagefactory-night.timer").is_file()
    (tmp_path / "hook").write_text("https://chat.example.org/x")
    more = ("--metrics", "night.prom", "--webhook", str(tmp_path / "hook"))
    assert call("site", "nightly", *more, "--install", str(folder), root=tmp_path).code == 0
    service = (folder / "imagefactory-night.service").read_text()
    assert f"--metrics {Path.cwd() / 'night.prom'} --webhook {tmp_path / 'hook'}\n" in service
    assert json_of(call(*argv, str(folder), "--json", root=tmp_path), "nightly-install")["files"]


def test_a_step_runs_this_program_and_all_that_it_says_is_kept(tmp_path: Path) -> None:
    log = tmp_path / "log.txt"
    code, said = command._runner(tmp_path, log)(("config", "--json", "--no-such"))
    assert code == 2
    assert '"imagefactory.error/1"' in said
    text = log.read_text()
    assert text.startswith("\n$ imagefactory config --json --no-such\n")
    assert "no such option" in text
    assert text.endswith("exit code 2\n")


def test_a_step_runs_no_program_of_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A clone may have a click.py, or a folder of this program's name."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "imagefactory").mkdir()
    for name in ("click.py", "imagefactory/__init__.py", "imagefactory/__main__.py"):
        (tmp_path / name).write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    code, _ = command._runner(tmp_path, tmp_path / "log.txt")(("config", "--json"))
    assert code == 0
    assert not (tmp_path / "ran").exists()


def test_a_mail_that_cannot_be_sent_is_told(capfd: pytest.CaptureFixture[str]) -> None:
    command._mail("cat; exit 3", "what broke\n")
    said = capfd.readouterr()
    assert said.out == "what broke\n"
    assert "--mail ended with exit code 3" in said.err


def test_a_night_that_cannot_be_is_mailed_too(call: Call, factory: Project, tmp_path: Path) -> None:
    mail = tmp_path / "mail"
    root = factory.settings.root_path
    assert call("site", "nightly", "--mail", f"cat > {mail}", root=root).code == 2
    assert "registry = " in mail.read_text()


def test_what_changed_since_a_plan_is_told_whoever_did_it(
    call: Call, factory: Project, target: Target, registry: RegistryMadeHere, tmp_path: Path
) -> None:
    root, kept = factory.settings.root_path, tmp_path / "plan.json"
    (tmp_path / "gpus.yaml").write_text('- capability: "8.0"\n')
    asked = ("--inventory", str(tmp_path / "gpus.yaml"), "--registry", registry.host)
    assert call("plan", NAME, *asked, "--keep", str(kept), root=root).code == 0
    since = ("site", "nightly", "--kept", str(kept))
    issue = call(*since, "--github", root=root).out
    assert f"- `{NAME}`\n  - `it was due to be built, and is not built`" in issue

    put_base(factory, target)
    put_built(factory, target)
    push(factory, target, registry)
    assert call(*since, "--github", root=root).out.strip() == ""
    told = json_of(call(*since, "--json", root=root), "nightly")
    assert [row["what"] for row in told["built"]] == [NAME]
    assert [(row["what"], row["on"]) for row in told["due"]] == [(NAME, "8.0")]
    assert json.loads((Path(told["directory"]) / "night.json").read_text()) == told
    assert f"built\n  {NAME}" in call(*since, root=root).out
    assert call("plan", "--tuples", "x.csv", "--keep", "y", root=root).code == 2


def test_no_line_of_a_mail_is_a_command_or_steers_a_terminal(tmp_path: Path) -> None:
    """GNU's mail runs `~!COMMAND` of its input. What is quoted may be anyone's."""
    command._mail(f"cat > {tmp_path / 'mail'}", "broken\n~!touch x\n  ~ a\n\x1b]0;x\x07~.\n")
    assert (tmp_path / "mail").read_text() == "broken\n ~!touch x\n  ~ a\n?]0;x?~.\n"


def test_a_folder_that_no_unit_can_name_is_refused(call: Call, tmp_path: Path) -> None:
    root = tmp_path / "f\nExecStart=x"
    root.mkdir()
    done = call("site", "nightly", "--install", str(tmp_path / "units"), root=root)
    assert done.code == 2
    assert not (tmp_path / "units").exists()
