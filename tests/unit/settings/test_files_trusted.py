"""Whose project counts: ownership by what is on the disk, and trust by path and content."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest

from imagefactory.errors import EXIT_OK, EXIT_TOOL, EXIT_USAGE, UsageError
from imagefactory.settings.files import UntrustedProjectError, is_trusted, trust_project, untrust_project
from imagefactory.settings.load import Settings, load_settings
from imagefactory.trust.keys import make_key
from imagefactory.trust.policy import read_trust
from tests.made.command import Said, json_of, say
from tests.made.errors import fails
from tests.made.trusted import trust, write_settings

TEXT = 'solver = "micromamba"\n'
STRANGER, ME = 4711, 4712
root_only = pytest.mark.skipif(os.geteuid() != 0, reason="gives files to other users")


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "home"


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A project of a stranger."""
    folder = tmp_path / "clone"
    folder.mkdir()
    (folder / "imagefactory.toml").write_text(TEXT)
    return folder


# --- the record ----------------------------------------------------------------------------------


def test_trust_is_of_a_path_and_a_content(tmp_path: Path, home: Path, clone: Path) -> None:
    environ, content = {"HOME": str(home)}, TEXT.encode()
    assert not is_trusted(clone, content, environ)
    record = trust_project(clone, content, environ)
    assert record.is_relative_to(home)
    assert record.parent.stat().st_mode & 0o777 == 0o700
    assert is_trusted(clone, content, environ)
    assert not is_trusted(clone, content + b"#", environ)
    assert not is_trusted(clone, content, {"HOME": str(tmp_path / "other")})
    (tmp_path / "link").symlink_to(clone)
    assert is_trusted(tmp_path / "link", content, environ)
    shutil.copytree(clone, tmp_path / "copy")
    assert not is_trusted(tmp_path / "copy", content, environ)
    trust_project(clone, b"other", environ)
    assert not is_trusted(clone, content, environ)  # what was trusted once is not trusted for ever
    assert untrust_project(clone, environ)
    assert not untrust_project(clone, environ)
    assert not is_trusted(clone, b"other", environ)


@root_only
def test_a_record_of_another_user_is_not_heeded(home: Path, clone: Path) -> None:
    record = trust_project(clone, TEXT.encode(), {"HOME": str(home)})
    os.chown(record, STRANGER, STRANGER)
    assert not is_trusted(clone, TEXT.encode(), {"HOME": str(home)})


def test_a_fifo_in_the_files_place_is_an_error(clone: Path) -> None:
    (clone / "imagefactory.toml").unlink()
    os.mkfifo(clone / "imagefactory.toml")
    with fails("settings-file-invalid"):
        load_settings(directory=clone, start=clone, environ={})


def test_a_relative_home_is_no_folder_of_a_project(clone: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(clone)
    own = clone / ".config/imagefactory"
    own.mkdir(parents=True)
    (own / "imagefactory.toml").write_text('registry = "evil.example"\n')
    for environ in ({"HOME": "."}, {"HOME": ".", "XDG_CONFIG_HOME": ".config"}):
        assert load_settings(directory=None, start=Path("/"), environ=environ).registry.value == ""
        with pytest.raises(UntrustedProjectError):
            load_settings(directory=clone, start=clone, environ=environ)


# --- ownership -----------------------------------------------------------------------------------


def upwards(folder: Path, environ: Mapping[str, str], user: int) -> Settings:
    below = folder / "a/b"
    below.mkdir(parents=True, exist_ok=True)
    return load_settings(directory=None, start=below, environ=environ, user=user)


@root_only
@pytest.mark.parametrize("user", [ME, 0])
@pytest.mark.parametrize("whose", ["file", "folder", "link", "target"])
def test_a_project_above_counts_only_where_it_is_the_users_own(
    tmp_path: Path, home: Path, user: int, whose: str
) -> None:
    root, environ = tmp_path / "root", {"HOME": str(home)}
    root.mkdir()
    file = root / "imagefactory.toml"
    target = tmp_path / "target.toml" if whose in ("link", "target") else file
    target.write_text('site = "chtc"\n')
    if target != file:
        file.symlink_to(target)
    for path in (root, file, target):
        os.chown(path, user, user, follow_symlinks=False)
    assert upwards(root, environ, user).site.value == "chtc"
    os.chown({"folder": root, "target": target}.get(whose, file), STRANGER, -1, follow_symlinks=False)
    with fails("project-owner-not-trusted") as caught:
        upwards(root, environ, user)
    assert f"imagefactory -C {root} config --trust" in caught.value.hint
    named = load_settings(directory=root, start=root, environ=environ, user=user)
    assert named.site.value == "chtc"
    trust(root, environ)
    assert upwards(root, environ, user).site.value == "chtc"


@root_only
def test_root_takes_the_project_of_the_user_who_called_sudo(tmp_path: Path) -> None:
    (tmp_path / "imagefactory.toml").write_text('site = "chtc"\n')
    for path in (tmp_path, tmp_path / "imagefactory.toml"):
        os.chown(path, STRANGER, STRANGER)
    with pytest.raises(UsageError):
        upwards(tmp_path, {"SUDO_UID": "4710"}, 0)
    assert upwards(tmp_path, {"SUDO_UID": str(STRANGER)}, 0).site.value == "chtc"
    with pytest.raises(UsageError):
        upwards(tmp_path, {"SUDO_UID": str(STRANGER)}, ME)


@pytest.mark.parametrize(
    ("folder", "file", "counts"),
    [(0o755, 0o644, True), (0o1777, 0o644, True), (0o777, 0o644, False), (0o755, 0o666, False)],
)
def test_what_every_user_can_write_does_not_count(
    tmp_path: Path, folder: int, file: int, counts: bool
) -> None:
    root = tmp_path / "root"
    root.mkdir()
    (root / "imagefactory.toml").write_text('site = "chtc"\n')
    (root / "a/b").mkdir(parents=True)
    (root / "imagefactory.toml").chmod(file)
    root.chmod(folder)
    if counts:
        assert upwards(root, {}, os.geteuid()).site.value == "chtc"
    else:
        with fails("project-world-writable"):
            upwards(root, {}, os.geteuid())


# --- the commands ----------------------------------------------------------------------------------


@pytest.fixture
def mine(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(home))


@pytest.mark.usefixtures("mine")
def test_a_command_stops_and_settings_and_doctor_show_why(
    clone: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(*words: str) -> Said:
        return say(capsys, "-C", str(clone), *words)

    stopped = run("list", "--json")
    assert stopped.code == EXIT_USAGE
    (error,) = json_of(stopped, "error")["errors"]
    assert error["code"] == "project-not-trusted"
    assert f"{clone}/imagefactory.toml:1" in error["message"]
    assert error["hint"].endswith(f"imagefactory -C {clone} config --trust")
    shown = run("config", "--json")
    assert shown.code == EXIT_OK
    told = json_of(shown, "config")
    assert told["untrusted"] == [{"name": "solver", "value": "micromamba", "line": 1}]
    assert next(row["value"] for row in told["settings"] if row["name"] == "solver") == "rattler"
    assert "solver" in run("config").err
    found = json_of(run("doctor", "--for", "job", "--json"), "doctor")
    project = found["findings"][0]
    assert (project["name"], project["status"]) == ("project", "denied")
    assert "config --trust" in project["fix"]


@pytest.mark.usefixtures("mine")
def test_trust_is_given_shown_and_taken_back(clone: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def run(*words: str) -> Said:
        return say(capsys, "-C", str(clone), "config", *words)

    told = json_of(run("--trust", "--json"), "config-trust")
    assert told["settings"] == [{"name": "solver", "value": "micromamba", "line": 1}]
    value = json_of(run("--json"), "config")
    assert value["untrusted"] == []
    assert next(row["value"] for row in value["settings"] if row["name"] == "solver") == "micromamba"
    with (clone / "imagefactory.toml").open("a") as file:
        file.write('site = "chtc"\n')
    assert [row["name"] for row in json_of(run("--json"), "config")["untrusted"]] == ["solver"]
    assert "solver" in run("--trust").out
    assert json_of(run("--untrust", "--json"), "config-trust")["changed"] is True
    assert json_of(run("--untrust", "--json"), "config-trust")["changed"] is False
    assert run("--trust", "--untrust").code == EXIT_USAGE


@pytest.mark.usefixtures("mine")
def test_trust_needs_a_project(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    assert say(capsys, "config", "--trust").code == EXIT_USAGE


@pytest.mark.usefixtures("mine")
@pytest.mark.parametrize("answer", [True, False])
def test_a_person_at_a_terminal_is_asked_once(
    clone: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, answer: bool
) -> None:
    questions = []

    def confirm(text: str, **_: object) -> bool:
        questions.append(text)
        return answer

    monkeypatch.setattr("imagefactory.cli.output.is_terminal", lambda: True)
    monkeypatch.setattr("click.confirm", confirm)
    (clone / "imagefactory.toml").write_text('codec = "gzip"\nregistry = "registry.example/gpu"\n')
    first = say(capsys, "-C", str(clone), "key", "list")
    assert ("2: registry = registry.example/gpu" in first.err, len(questions)) == (True, 1)
    assert first.code == (EXIT_OK if answer else EXIT_USAGE)
    say(capsys, "-C", str(clone), "key", "list")
    assert len(questions) == (1 if answer else 2)
    (clone / "imagefactory.toml").write_text('registry = "other.example/gpu"\n')
    assert say(capsys, "-C", str(clone), "key", "list", "--json").code == EXIT_USAGE  # no program is asked
    assert len(questions) == (1 if answer else 2)


# --- keys --------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("mine")
def test_a_strangers_own_key_counts_for_nobody(
    tmp_path: Path, home: Path, clone: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Neither by a command nor behind the user's own key, and the user's row of a key counts."""
    make_key(home / ".config/imagefactory/keys", "lab")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/imagefactory.toml").touch()
    assert say(capsys, "-C", str(tmp_path / "mine"), "key", "trust", "lab").code == EXIT_OK
    row = (tmp_path / "mine/imagefactory.toml").read_text()
    (clone / "imagefactory.toml").write_text(row)
    assert say(capsys, "-C", str(clone), "key", "list").code == EXIT_USAGE
    assert say(capsys, "key", "trust", "--user", "lab", "--until", "2098-01-01").code == EXIT_OK
    shown = say(capsys, "-C", str(clone), "key", "list", "--json")
    assert [key["valid_until"][:4] for key in json_of(shown, "key-list")["keys"]] == ["2098"]


@pytest.mark.usefixtures("mine")
def test_a_new_key_keeps_the_trust_and_trusts_no_other_line(
    home: Path, clone: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(*words: str) -> Said:
        return say(capsys, "-C", str(clone), "key", *words)

    def trusted() -> bool:
        try:
            loaded = load_settings(directory=clone, start=clone, environ=os.environ)
        except UntrustedProjectError:
            return False
        return bool(read_trust(loaded.files).keys)

    file = clone / "imagefactory.toml"
    make_key(home / ".config/imagefactory/keys", "lab")
    assert run("trust", "lab").code == EXIT_USAGE
    assert file.read_text() == TEXT
    write_settings(clone, TEXT)
    assert run("trust", "lab").code == EXIT_OK
    assert trusted()
    assert run("retire", "lab").code == EXIT_OK
    assert trusted()
    # A row of a key that the user knows asks nobody; it does not become trusted with another.
    make_key(home / ".config/imagefactory/keys", "other")
    assert say(capsys, "key", "trust", "--user", "other").code == EXIT_OK
    file.write_text("")
    assert run("trust", "other").code == EXIT_OK
    untrust_project(clone, os.environ)
    make_key(home / ".config/imagefactory/keys", "third")
    assert "config --trust" in run("trust", "third").out
    assert not trusted()


def test_doctor_is_good_again(
    clone: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, home: Path
) -> None:
    monkeypatch.setenv("HOME", str(home))
    write_settings(clone, 'site = "chtc"\n')
    said = say(capsys, "-C", str(clone), "doctor", "--for", "job", "--json")
    assert said.code in (EXIT_OK, EXIT_TOOL)
    assert "project" not in [one["name"] for one in json.loads(said.out)["findings"]]
