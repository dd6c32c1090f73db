"""What runs mmdebstrap, tried for real with hostile commands: as root, and as an ordinary user.

Needs root, perl, and newuidmap for the ordinary user, who is made and removed.
"""

from __future__ import annotations

import json
import os
import pwd
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import imagefactory
from tests.services.children import LIMIT, child, stdout_of, wait_for
from tests.services.hostile_script import ALLOWED, Host, make_host, parse_report

# Runs a command as a build: its exit code or the code of the error, and what it wrote.
RUN = """
import json, os, sys
from pathlib import Path
from imagefactory.build.base.make import builder_facts, choose_ids
from imagefactory.errors import ImagefactoryError
from imagefactory.runtime.build_sandbox import SYSTEM_PATH, BuildProcess, prepare_directory

folder, argv = Path(sys.argv[1]), tuple(sys.argv[2:])
folder.mkdir(exist_ok=True)
prepare_directory(folder)
environment = {"PATH": SYSTEM_PATH, "TMPDIR": "/tmp"}
build = BuildProcess(folder, argv, environment=environment, ids=choose_ids(builder_facts()))
with build.process as process:
    print(process.pid, file=sys.stderr, flush=True)
    stdout, stderr = process.communicate()
    try:
        code = build.wait()
    except ImagefactoryError as error:
        code = f"{type(error).__name__}: {error}"
print(json.dumps([code, stdout.decode(), stderr.decode()]))
"""

# What a build leaves in its scratch folder, and what is left of the folder afterwards.
LEAVE = """
import sys
from pathlib import Path
from imagefactory.build.base.make import _scratch
from imagefactory.build.base.make import builder_facts, choose_ids
from imagefactory.runtime.build_sandbox import SYSTEM_PATH, BuildProcess, prepare_directory

ids, parent = choose_ids(builder_facts()), Path(sys.argv[1])
parent.mkdir()
with _scratch({"TMPDIR": str(parent)}, ids) as scratch:
    prepare_directory(scratch)
    build = BuildProcess(scratch, ("sh", "-c", sys.argv[2]), environment={"PATH": SYSTEM_PATH}, ids=ids)
    with build.process as process:
        process.communicate()
        assert build.wait() == 0
    assert any((scratch / "tree").iterdir())
print(len(list(parent.iterdir())))
"""


@pytest.fixture(scope="module")
def room() -> Iterator[Path]:
    """A folder that other users may enter, with the code."""
    assert os.geteuid() == 0
    folder = Path(tempfile.mkdtemp(prefix="imagefactory-test-"))
    folder.chmod(0o755)
    shutil.copytree(Path(imagefactory.__file__).parent, folder / "code/imagefactory")
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def stranger(room: Path) -> Iterator[str]:
    name = f"ifbuild{os.getpid()}"
    subprocess.run(["useradd", "--create-home", "--base-dir", str(room), name], check=True)
    yield name
    subprocess.run(["userdel", name], check=True)


class Builder:
    """Runs commands as builds of one user, in a home that is closed to all others."""

    def __init__(self, room: Path, user: str) -> None:
        self.room, self.user = room, user
        found = pwd.getpwnam(user)
        self.home = Path(tempfile.mkdtemp(prefix=f"{user}-", dir=room))
        os.chown(self.home, found.pw_uid, found.pw_gid)
        self.folder = self.home / "build"

    def argv(self, *command: str, program: str = RUN) -> list[str]:
        switch = ["setpriv", "--reuid", self.user, "--regid", self.user, "--init-groups"]
        prefix = [] if self.user == "root" else switch
        return [*prefix, os.path.realpath(sys.executable), "-c", program, str(self.folder), *command]

    @property
    def environment(self) -> dict[str, str]:
        return {
            "PATH": "/usr/bin:/bin",
            "PYTHONPATH": str(self.room / "code"),
            "PYTHONDONTWRITEBYTECODE": "1",
        }

    def run(self, *command: str) -> tuple[int | str, str, str]:
        output = stdout_of(self.argv(*command), env=self.environment, cwd="/")
        code, stdout, stderr = json.loads(output)
        return code, stdout, stderr


@pytest.fixture(params=["root", "ordinary"])
def builder(request: pytest.FixtureRequest, room: Path, stranger: str) -> Builder:
    return Builder(room, "root" if request.param == "root" else stranger)


@pytest.fixture
def host(builder: Builder, room: Path) -> Iterator[Host]:
    with make_host(room, builder.home.name) as made:
        yield made


def test_a_script_reaches_nothing_of_the_host(builder: Builder, host: Host) -> None:
    script = 'perl -e "$1"; cat /dev/shm/report'
    _, stdout, stderr = builder.run("sh", "-c", script, "sh", host.script("/dev/shm/report"))
    found = parse_report(stdout)
    assert len(found) > 20, stderr
    assert [name for name, reached in found.items() if reached] == list(ALLOWED)
    host.check()


def test_it_has_no_id_of_the_host_that_owns_anything(builder: Builder) -> None:
    code, stdout, _ = builder.run(
        "sh", "-c", "id -u; cat /proc/self/uid_map /proc/self/gid_map; stat -c %u /usr"
    )
    assert code == 0
    uid, uids, gids, owner = stdout.splitlines()
    assert (uid, owner) == ("0", "65534")
    for line in (uids, gids):
        inside, outside, count = map(int, line.split())
        assert (inside, count) == (0, 65536)
        assert outside > 65534
        assert outside > pwd.getpwnam(builder.user).pw_uid


def test_it_sees_only_what_it_needs(builder: Builder) -> None:
    code, stdout, _ = builder.run(
        "sh", "-c", "ls /etc; cut -d: -f1 /etc/passwd; ls /run /var /root /sys /tmp"
    )
    assert code == 0
    assert stdout.split() == [
        *("alternatives", "group", "ld.so.cache", "passwd"),
        *("root", "_apt", "nobody"),
        *("/root:", "/run:", "/sys:", "/tmp:", "/var:"),
    ]


def test_a_signal_to_all_processes_stays_inside(builder: Builder, host: Host) -> None:
    code, _, _ = builder.run("perl", "-e", "kill('KILL', -1); sleep(1) while kill(0, -1); exit 7")
    assert code == 7
    host.check()


@pytest.mark.parametrize("command", ["exit 3", "kill -TERM $$"])
def test_the_exit_code_is_the_commands(builder: Builder, command: str) -> None:
    code, _, _ = builder.run("sh", "-c", command)
    assert code == (3 if "exit" in command else 128 + signal.SIGTERM)


def test_a_program_that_is_not_there(builder: Builder) -> None:
    code, _, stderr = builder.run("no-such-program")
    assert code == 127
    assert "no-such-program" in stderr


def test_what_a_build_leaves_behind_ends_with_it(builder: Builder) -> None:
    code, stdout, _ = builder.run("sh", "-c", "setsid sleep 1000 & setsid sleep 1000 & echo done")
    assert (code, stdout) == (0, "done\n")


def test_too_many_processes_end_the_build(builder: Builder) -> None:
    code, _, _ = builder.run(
        "perl", "-e", "while (1) { my $pid = fork(); if (defined $pid && !$pid) { sleep } }"
    )
    assert str(code).startswith("BuildError")
    assert "processes" in str(code)


def test_a_build_is_killed_first_when_memory_ends(builder: Builder) -> None:
    assert builder.run("cat", "/proc/self/oom_score_adj")[:2] == (0, "1000\n")


def test_a_killed_caller_takes_the_build_along(builder: Builder) -> None:
    mark = f"{builder.home}-mark"
    argv = builder.argv("sh", "-c", f"sleep 1000; : {mark}")
    with child(argv, env=builder.environment, cwd="/", stderr=subprocess.PIPE) as process:
        assert process.stderr is not None
        assert process.stderr.readline().strip().isdigit()

        def running() -> list[str]:
            found = []
            for path in Path("/proc").glob("[0-9]*/cmdline"):
                try:
                    words = path.read_bytes().split(b"\0")
                except OSError:
                    continue
                if words[:2] == [b"sh", b"-c"] and mark.encode() in words[2]:
                    found.append(str(path))
            return found

        wait_for(running, "the command of the build starts")
        process.kill()
        process.wait(timeout=LIMIT)
        wait_for(lambda: not running(), "the command of the build ends")


def test_the_callers_folder_closed_to_others_is_reached(builder: Builder) -> None:
    """A home of mode 0700 above it: mmdebstrap's ids may not enter it by its path."""
    assert builder.home.stat().st_mode & 0o077 == 0
    code, stdout, stderr = builder.run("sh", "-c", "touch /tmp/file && ls /tmp && ls -d /input")
    assert (code, stdout) == (0, "file\n/input\n"), stderr
    assert (builder.folder / "tree/file").exists()
    assert (builder.folder / "tree/file").stat().st_uid > 65535


def test_what_a_script_leaves_is_removed(builder: Builder) -> None:
    leave = "cd /tmp && mkdir -p a/b && touch a/b/c && chmod 0 a/b a && ln -s / link && mkfifo d"
    done = subprocess.run(
        builder.argv(leave, program=LEAVE),
        env=builder.environment, capture_output=True, text=True, check=False, cwd="/",
    )  # fmt: skip
    assert done.stdout == "0\n", done.stderr
