"""systemd's units of a night."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from imagefactory.errors import UsageError
from imagefactory.extras.nightly.units import enable_commands, format_units
from imagefactory.settings.load import NONCE_STORE_KEY

COMMAND = (
    "/opt/py 3/python",
    "-m",
    "imagefactory",
    "night",
    "pytorch-*",
    "--mail",
    "mail -s '100%' \"$USER\"",
)
ENVIRON = {
    "PATH": "/opt/condor/bin:/usr/bin",
    "IMAGEFACTORY_STORE": "/big disk/$x",
    "SBATCH_ACCOUNT": "gpu-tests",
    "SLURM_CONF": "/etc/slurm.conf",
    NONCE_STORE_KEY: "secret",
    "HOME": "/home/me",
}


def test_the_service_runs_the_command_with_this_shells_settings_and_no_secret() -> None:
    files = format_units("/home/me/factory", COMMAND, ENVIRON)
    assert list(files) == ["imagefactory-night.service", "imagefactory-night.timer"]
    service = files["imagefactory-night.service"]
    (line,) = (one for one in service.splitlines() if one.startswith("ExecStart="))
    words = shlex.split(line.removeprefix("ExecStart="))
    assert tuple(word.replace("%%", "%").replace("$$", "$") for word in words) == COMMAND
    assert "100%%" in line
    assert "$$USER" in line
    assert 'Environment="IMAGEFACTORY_STORE=/big disk/$x"' in service
    assert "Environment=PATH=/opt/condor/bin:/usr/bin" in service
    assert "Environment=SBATCH_ACCOUNT=gpu-tests" in service
    assert "Environment=SLURM_CONF=/etc/slurm.conf" in service
    assert "secret" not in service
    assert "HOME" not in service
    assert "WorkingDirectory=/home/me/factory\n" in service


def test_the_timer_comes_each_day_and_makes_up_for_a_night_that_was_missed() -> None:
    timer = format_units("/f", COMMAND, {})["imagefactory-night.timer"]
    assert "OnCalendar=*-*-* 02:17\n" in timer
    assert "Persistent=true\n" in timer
    assert [command.split()[0] for command in enable_commands()] == ["systemctl", "loginctl"]


@pytest.mark.parametrize(
    "folder",
    [
        "/f\nExecStart=/bin/evil",
        "/f\r[Service]",
        "/f\x1b[2J",
        "/f\u2028",
        "/f\\",
        "/f ",
        "/f\udcff",
        "/f\x85x",
    ],
)
def test_a_folder_that_no_line_can_name_is_refused(folder: str) -> None:
    with pytest.raises(UsageError):
        format_units(folder, COMMAND, ENVIRON)


WORDS = (
    "a\nExecStart=/bin/evil",
    "a\rb",
    "a\\",
    "a\\\nb",
    '"',
    "'",
    "%h",
    "$HOME",
    ";",
    "",
    " ",
    "\t#",
    "ü",
    "\udcff",
    "\x85",
)


def test_no_word_or_setting_is_another_line() -> None:
    environ = {f"IMAGEFACTORY_{number}": word for number, word in enumerate(WORDS)}
    service = format_units("/home/me/a b%h", ("/bin/x", *WORDS), environ)["imagefactory-night.service"]
    plain = format_units("/f", ("/bin/x",), dict.fromkeys(environ, "x"))["imagefactory-night.service"]
    assert len(re.split("[\n\r\x85\u2028\0]", service)) == len(plain.split("\n"))
    assert service.encode()


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="systemd's own reader of units is not here")
def test_systemd_reads_the_words_as_they_were_meant(tmp_path: Path) -> None:
    """`systemd-analyze verify` says what it does not take, and nothing of what it takes."""
    words = [word for word in WORDS if word.isascii() and word]
    environ = {f"IMAGEFACTORY_{number}": word for number, word in enumerate(words)}
    units = format_units("/tmp", ("/bin/true", *words), environ)
    for name, text in units.items():
        (tmp_path / name).write_text(text)
    run = ["systemd-analyze", "--man=no", "--recursive-errors=no", "verify"]
    done = subprocess.run(
        [*run, str(tmp_path / "imagefactory-night.service")], capture_output=True, text=True, check=False
    )
    assert "imagefactory-night.service:" not in done.stderr
