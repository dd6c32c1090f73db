"""What BuildKit prints, as buildx 0.13 with dockerd 26 printed it, and the command that makes it."""

from __future__ import annotations

import pytest

from imagefactory.build.docker import (
    LONGEST_LINE,
    TAIL_LINES,
    BuildEventKind,
    BuildLog,
    BuildxRequest,
    clean,
    command,
    parse_line,
    pip_note,
)

BUILD = BuildxRequest(
    context="context",
    base="imagefactory/base:0123456789ab",
    tag="imagefactory/build:abc",
    platform="linux/amd64",
    epoch=1_700_000_000,
    secrets=(("pip.conf", "env=NAME"), ("ca.pem", "src=ca.pem")),
    host_network=False,
)

GOOD = """\
#0 building with "default" instance using docker driver

#1 [internal] load build definition from Dockerfile
#1 transferring dockerfile: 4.96kB done
#1 DONE 0.1s

#4 [base 1/2] FROM docker.io/library/base:debian-12
#4 CACHED

#6 [base 2/2] RUN set -eu;     if ! dpkg --status gcc > /dev/null 2>&1; then         apt-get update;     fi
#6 DONE 0.5s

#9 [build 1/2] COPY requirements.txt /opt/requirements.txt
#9 ...

#10 [stage-2 1/1] COPY --from=build /opt/env /opt/env
#10 DONE 0.1s

#9 [build 1/2] COPY requirements.txt /opt/requirements.txt
#9 DONE 0.2s

#11 [build 2/2] RUN --mount=type=secret,id=pip.conf,target=/mnt/pip.conf     set -eu;     \
if test -e /mnt/pip.conf; then export PIP_CONFIG_FILE=/mnt/pip.conf; fi;     pip install
#11 3.227 Collecting idna==3.7
#11 3.442 Successfully installed idna-3.7
#11 DONE 61.4s

#12 exporting to image
#12 exporting layers 0.1s done
#12 DONE 0.1s
"""

BAD = """\
#4 [1/2] FROM docker.io/library/base:debian-12
#4 CACHED

#5 [2/2] RUN echo one; exit 3
{lines}
#5 0.186 a\x1b[31mred\x1b[0m\rb
#5 ERROR: process "/bin/sh -c echo one; exit 3" did not complete successfully: exit code: 3
------
 > [2/2] RUN echo one; exit 3:
0.186 a\x1b[31mred\x1b[0m\rb
------
Dockerfile:3
--------------------
   3 | >>> RUN echo one; exit 3
--------------------
ERROR: failed to solve: process "/bin/sh -c echo one; exit 3" did not complete successfully: exit code: 3
"""


def read(text: str) -> BuildLog:
    transcript = BuildLog()
    for line in text.split("\n"):  # not splitlines: a line may hold a carriage return
        transcript.feed(line)
    return transcript


def test_command() -> None:
    argv = command(BUILD)
    assert argv[:5] == ("docker", "buildx", "build", "--builder", "default")
    assert argv[-1] == "context"
    assert "--provenance=false" in argv
    joined = " ".join(argv)
    assert "--secret id=pip.conf,env=NAME --secret id=ca.pem,src=ca.pem" in joined
    assert (
        "--build-arg BASE=imagefactory/base:0123456789ab --build-arg SOURCE_DATE_EPOCH=1700000000" in joined
    )
    assert "--network" not in argv


@pytest.mark.parametrize(
    ("line", "kind", "step", "text"),
    [
        ("#6 [base 2/3] RUN x\n", BuildEventKind.BEGAN, 6, "[base 2/3] RUN x"),
        ("#6 0.234 hello  there\n", BuildEventKind.OUTPUT, 6, "hello  there"),
        ("#6 0.234\n", BuildEventKind.OUTPUT, 6, ""),
        ("#6 CACHED\n", BuildEventKind.CACHED, 6, ""),
        ("#6 DONE 12.5s\n", BuildEventKind.DONE, 6, ""),
        (
            "#6 ERROR: process failed: exit code: 1\n",
            BuildEventKind.FAILED,
            6,
            "process failed: exit code: 1",
        ),
        ("#6 CANCELED\n", BuildEventKind.OTHER, 6, "CANCELED"),
        ("#6 ...\n", BuildEventKind.OTHER, 6, "..."),
        ("#6 sha256:00 1.05MB / 2.10MB 0.2s\n", BuildEventKind.OTHER, 6, "sha256:00 1.05MB / 2.10MB 0.2s"),
        ("ERROR: failed to solve: x\n", BuildEventKind.OTHER, None, "ERROR: failed to solve: x"),
        ("\n", BuildEventKind.OTHER, None, ""),
        ("# a comment in a Dockerfile\n", BuildEventKind.OTHER, None, "# a comment in a Dockerfile"),
    ],
)
def test_lines(line: str, kind: BuildEventKind, step: int | None, text: str) -> None:
    event = parse_line(line)
    assert (event.kind, event.step, event.text) == (kind, step, text)


def test_seconds_of_a_step() -> None:
    assert parse_line("#6 DONE 61.4s").seconds == 61.4


def test_clean_shows_what_a_terminal_would() -> None:
    assert clean("a\x1b[31mred\x1b[0m\rb\n") == "b"
    assert clean("50%\r100%\r\n") == "100%"
    assert clean("bell\x07 and \x9b escape\u2028 end") == "bell  and   escape  end"
    assert len(clean("x" * 10_000)) <= LONGEST_LINE + 4


def test_steps_are_counted_as_the_stages_show_themselves() -> None:
    transcript = BuildLog()
    seen = []
    for line in GOOD.splitlines():
        transcript.feed(line)
        seen.append((transcript.finished, transcript.total))
    assert seen[-1] == (5, 5)
    assert all(done <= total for done, total in seen)
    assert (1, 2) in seen  # the base stage alone, its first step cached


def test_names_are_short() -> None:
    transcript = read(GOOD)
    assert transcript.name(11) == "build 2/2: RUN pip install"
    assert transcript.name(6).startswith("base 2/2: RUN if ! dpkg --status gcc")
    assert transcript.name(12) == "exporting to image"
    assert transcript.name(99) == ""
    assert [step for step in range(13) if transcript.counts(step)] == [4, 6, 9, 10, 11]


def test_failure_names_the_step_and_shows_its_last_lines() -> None:
    lines = "\n".join(f"#5 0.186 line {n}" for n in range(100))
    failure = read(BAD.format(lines=lines)).failure()
    assert failure.step == "2/2: RUN echo one; exit 3"
    assert failure.reason == "exit code 3"
    assert len(failure.tail) == TAIL_LINES
    assert failure.tail[-2:] == ("line 99", "b")


def test_reason_stands_behind_a_long_command() -> None:
    line = f'#5 ERROR: process "/bin/sh -c {"true; " * 500}" did not complete successfully: exit code: 127'
    assert read(f"#5 [2/2] RUN x\n{line}\n").failure().reason == "exit code 127"
    assert len(read(f"#5 [2/2] RUN x\n#5 ERROR: {'x' * 5000}\n").failure().reason) <= LONGEST_LINE + 4


def test_failure_outside_of_the_steps() -> None:
    text = (
        "Dockerfile:1\n--------------------\n   1 | >>> FRO x\n--------------------\n"
        "ERROR: failed to solve: dockerfile parse error on line 1: unknown instruction: FRO\n"
    )
    failure = read(text).failure()
    assert (failure.step, failure.reason) == (
        "",
        "failed to solve: dockerfile parse error on line 1: unknown instruction: FRO",
    )
    assert "   1 | >>> FRO x" in failure.tail
    assert read("").failure().reason == "it gave no reason"


@pytest.mark.parametrize(
    ("line", "note"),
    [
        ("Installing collected packages: mpmath, torch", "installing 2 packages"),
        ("Installing collected packages: idna", "installing 1 package"),
        (
            "  Downloading torch-2.3.1-cp311-cp311-manylinux1_x86_64.whl (779.1 MB)",
            "downloading torch, 779.1 MB",
        ),
        ("  Downloading idna-3.7-py3-none-any.whl (66 kB)", ""),
        ("  Downloading sympy-1.13-py3-none-any.whl (6.2 MB)", ""),
        ("Collecting idna==3.7", ""),
    ],
)
def test_pip_notes_are_few(line: str, note: str) -> None:
    assert pip_note(line) == note
