"""systemd's units of a night."""

from __future__ import annotations

import shlex

from imagefactory.settings.load import LEDGER_KEY
from imagefactory.stages.night_units import enabling, format_units

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
    LEDGER_KEY: "secret",
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
    assert "secret" not in service
    assert "HOME" not in service
    assert "WorkingDirectory=/home/me/factory\n" in service


def test_the_timer_comes_each_day_and_makes_up_for_a_night_that_was_missed() -> None:
    timer = format_units("/f", COMMAND, {})["imagefactory-night.timer"]
    assert "OnCalendar=*-*-* 02:17\n" in timer
    assert "Persistent=true\n" in timer
    assert [command.split()[0] for command in enabling()] == ["systemctl", "loginctl"]
