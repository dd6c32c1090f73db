"""Signing programs: small ones that sign, and those that do all that they must not; and a real ssh-agent."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_ssh_public_key,
)

from imagefactory.actions.publish import current_place, read_current
from imagefactory.errors import EXIT_USAGE, StatementError, ToolError, UsageError
from imagefactory.trust.envelope import is_signed_by, parse_envelope, sign_envelope
from imagefactory.trust.keys import (
    PublicKey,
    SigningProgram,
    find_command,
    find_key,
    format_command,
    format_public,
    keys_directory,
    own_keys,
    parse_command,
    parse_public,
    read_signing_key,
    record_program,
)
from imagefactory.trust.policy import read_trust
from tests.made.command import json_of
from tests.made.errors import fails
from tests.made.signing import Bench
from tests.made.trusted import write_settings
from tests.made.verdicts import LAB, STRANGER

SSH_AGENT = Path(__file__).parents[3] / "examples/signing/ssh_agent.py"
SIGN = """\
import sys, base64
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
key = Ed25519PrivateKey.from_private_bytes(bytes.fromhex({secret!r}))
"""
Make = Callable[..., str]


@pytest.fixture
def made(tmp_path: Path) -> Make:
    """A program of these lines; gives its `--command`."""
    count = iter(range(99))

    def make(text: str) -> str:
        path = tmp_path / f"program{next(count)}.py"
        path.write_text(text)
        return shlex.join([sys.executable, "-I", str(path)])

    return make


def signer(seed: str, *, does: str = "sys.stdout.buffer.write(key.sign(sys.stdin.buffer.read()))") -> str:
    """The text of a program that signs as `make_signing_key(seed)` does."""
    return SIGN.format(secret=seed.encode().ljust(32, b".").hex()) + does


def program(command: str, public: bytes = LAB.public) -> SigningProgram:
    return SigningProgram("lab", find_command(command, os.environ), public)


def test_a_program_signs_as_a_file_does(made: Make) -> None:
    data = b"DSSEv1 " + os.urandom(4 << 20)  # far more than a pipe holds
    signed = program(made(signer("lab"))).sign(data)
    assert signed == LAB.sign(data)
    does = "print(base64.b64encode(key.sign(sys.stdin.buffer.read())).decode())"
    assert program(made(signer("lab", does=does))).sign(data) == signed


@pytest.mark.parametrize(
    ("text", "code"),
    [
        (signer("stranger"), "signature-mismatch"),  # another key
        (
            signer("lab", does="sys.stdout.buffer.write(key.sign(b'DSSEv1 what I like better'))"),
            "signature-mismatch",
        ),
        (signer("lab", does="import os; sys.stdout.buffer.write(os.urandom(64))"), "signature-mismatch"),
        (
            signer("lab", does="sys.stdout.buffer.write(key.sign(sys.stdin.buffer.read())[:63])"),
            "signing-program-output",
        ),
        (signer("lab", does="print(key.sign(sys.stdin.buffer.read()).hex())"), "signing-program-output"),
        (
            signer("lab", does="sys.stdout.buffer.write(key.sign(sys.stdin.buffer.read()) + b'x')"),
            "signing-program-output",
        ),
        ("", "signing-program-output"),
        ("print('x' * 88)", "signing-program-output"),
        ("import sys; sys.stdout.write('x' * (1 << 22))", "signing-program-output"),
        ("while True: print('x')", "signing-program-output"),
        ("raise SystemExit(3)", "signing-program-failed"),
        ("import os; os.kill(os.getpid(), 9)", "signing-program-failed"),
    ],
)
def test_what_is_not_a_signature_by_that_key_is_never_used(made: Make, text: str, code: str) -> None:
    with fails(code):
        program(made(text)).sign(b"x")


def test_a_right_signature_of_a_program_that_failed_is_not_used(made: Make) -> None:
    text = signer("lab") + "\nsys.stderr.write('first\\n\\x1b[31mthe token is locked\\n'); sys.exit(7)"
    with fails("signing-program-failed") as caught:
        program(made(text)).sign(b"x")
    assert "exit code 7" in caught.value.message
    assert "the token is locked" in caught.value.message
    assert "\x1b" not in caught.value.message


def test_one_that_hangs_is_ended_and_not_started_again(made: Make, tmp_path: Path) -> None:
    mark = tmp_path / "started"
    text = f"import os, time; open({str(mark)!r}, 'a').write(f'{{os.getpid()}} '); time.sleep(600)"
    hung = program(made(text))
    with fails("signing-program-timeout") as caught:
        hung.sign(b"x", seconds=0.3)
    begin = time.monotonic()
    with pytest.raises(ToolError) as again:
        hung.sign(b"y")  # with the whole time: a second program would have it
    assert again.value is caught.value
    assert time.monotonic() - begin < 30
    pids = [int(word) for word in mark.read_text().split()] if mark.exists() else []
    assert len(pids) <= 1
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


def test_one_that_closes_its_pipes_and_stays_is_ended(made: Make) -> None:
    text = "import os, time; os.close(1); os.close(2); time.sleep(600)"
    with fails("signing-program-timeout"):
        program(made(text)).sign(b"x", seconds=0.3)


def test_a_daemon_that_holds_the_pipes_does_not_hold_up(made: Make, tmp_path: Path) -> None:
    """As gpg starts its agent."""
    pid = tmp_path / "pid"
    start = (
        "import subprocess; sys.stdout.buffer.write(key.sign(sys.stdin.buffer.read())); sys.stdout.flush()\n"
        "daemon = subprocess.Popen(['sleep', '600'])\n"
        f"open({str(pid)!r}, 'w').write(str(daemon.pid))"
    )
    try:
        assert program(made(signer("lab", does=start))).sign(b"x") == LAB.sign(b"x")
    finally:
        os.kill(int(pid.read_text()), 9)


def test_it_is_started_elsewhere_without_a_shell(made: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("THE_PIN", "1234")
    does = (
        "import os\n"
        "if (os.getcwd(), os.environ['THE_PIN'], sys.argv[1:]) != ('/', '1234', ['$HOME', '; echo x']):\n"
        "    sys.exit(str(sys.argv))\n"
        "sys.stdout.buffer.write(key.sign(sys.stdin.buffer.read()))"
    )
    command = f"{made(signer('lab', does=does))} '$HOME' '; echo x'"
    assert program(command).sign(b"x") == LAB.sign(b"x")


def test_a_program_that_is_gone(tmp_path: Path) -> None:
    with fails("signing-program-failed"):
        SigningProgram("lab", (str(tmp_path / "none"),), LAB.public).sign(b"x")


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("", "option-invalid"),
        (" ", "option-invalid"),
        ("'x", "option-invalid"),
        ("''", "signing-program-missing"),
        ("no-such-program-here", "signing-program-missing"),
        ("/etc/passwd", "signing-program-missing"),
    ],
)
def test_what_is_not_a_command(text: str, code: str) -> None:
    with fails(code):
        find_command(text, os.environ)


def test_a_command_is_kept_word_by_word(tmp_path: Path) -> None:
    words = ("/bin/x", 'a "b"', "\\", "\x7f\x01\n", "é", "")
    assert parse_command(format_command(words), tmp_path) == words
    for text in ("", "command = 'x'", "command = []", 'command = ["x"]', 'command = ["/x", 1]', "\xff"):
        with pytest.raises(StatementError):
            parse_command(text.encode("latin-1"), tmp_path)
    with pytest.raises(StatementError):
        parse_command(b'command = ["/x"]\nshell = true', tmp_path)


def test_a_recorded_program_is_a_key_of_its_user(made: Make, tmp_path: Path) -> None:
    folder, public = keys_directory({"XDG_CONFIG_HOME": str(tmp_path)}), PublicKey(name="x", raw=LAB.public)
    key = record_program(folder, "lab", made(signer("lab")), public, os.environ)
    assert (key.name, key.keyid) == ("lab", LAB.keyid)
    assert own_keys(folder) == (key,)
    path = find_key("", {"XDG_CONFIG_HOME": str(tmp_path)})
    assert path == find_key("lab", {"XDG_CONFIG_HOME": str(tmp_path)}) == folder / "lab.command"
    assert path.stat().st_mode & 0o777 == 0o600
    sealed = sign_envelope(b"{}", read_signing_key(path))
    assert sealed == sign_envelope(b"{}", LAB)
    assert is_signed_by(parse_envelope(sealed, "x"), LAB.keyid, LAB.public)
    path.chmod(0o622)
    with pytest.raises(StatementError):
        read_signing_key(path)


def test_a_program_that_signs_wrongly_leaves_nothing(made: Make, tmp_path: Path) -> None:
    for text in (signer("stranger"), "raise SystemExit(1)"):
        with pytest.raises(ToolError):
            record_program(tmp_path, "lab", made(text), PublicKey(name="x", raw=LAB.public), os.environ)
    assert not list(tmp_path.glob("lab*"))


def test_a_path_never_names_a_program(made: Make, tmp_path: Path) -> None:
    """A project may be trusted, and its next commit is not: a program comes from the user's folder alone."""
    folder = tmp_path / "clone"
    folder.mkdir()
    command = find_command(made("open('ran', 'w')"), os.environ)
    (folder / "lab.command").write_bytes(format_command(command))
    (folder / "lab.command").chmod(0o600)
    (folder / "lab.pub").write_bytes(format_public(LAB.public))
    environ = {"XDG_CONFIG_HOME": str(tmp_path)}
    with pytest.raises(UsageError):
        find_key(str(folder / "lab.command"), environ)
    with pytest.raises(UsageError):
        find_key("lab", environ)
    (folder / "lab.pem").symlink_to("lab.command")
    found = find_key(str(folder / "lab.pem"), environ)
    assert found
    with pytest.raises(StatementError):
        read_signing_key(found)


def test_two_that_sign_under_one_name_are_a_fault(made: Make, tmp_path: Path) -> None:
    folder = keys_directory({"XDG_CONFIG_HOME": str(tmp_path)})
    record_program(folder, "lab", made(signer("lab")), PublicKey(name="x", raw=LAB.public), os.environ)
    with pytest.raises(UsageError):
        record_program(folder, "lab", made(signer("lab")), PublicKey(name="x", raw=LAB.public), os.environ)
    (folder / "lab.pem").touch()
    for setting in ("", "lab"):
        with pytest.raises(UsageError):
            find_key(setting, {"XDG_CONFIG_HOME": str(tmp_path)})


def test_public_keys_as_ssh_writes_them() -> None:
    key = Ed25519PrivateKey.generate().public_key()
    line = key.public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
    raw = key.public_bytes(Encoding.Raw, PublicFormat.Raw)
    for data in (line, line + b"\n", line + b" me@host with words\n"):
        assert parse_public(data, "x").raw == raw
        assert load_ssh_public_key(data)
    other = line.split()[1]
    for data in (
        b"ssh-rsa " + other,
        line[:-4],
        line + b"\n" + line,
        b"sk-" + line,
        line[:20] + b"B" + line[21:],
    ):
        with pytest.raises(UsageError):
            parse_public(data, "x")


def add_program(bench: Bench, made: Make, name: str, seed: str, *, command: str = "create") -> None:
    public = bench.folder / f"{seed}.public"
    public.write_bytes(format_public({"lab": LAB, "stranger": STRANGER}[seed].public))
    words = ("--command", made(signer(seed)), "--public", str(public))
    bench.call("key", command, *([name] if command == "create" else ["--name", name]), *words)


def test_everything_that_signs_does_so_by_a_program(bench: Bench, made: Make) -> None:
    root = bench.folder / "root"
    text = (root / "imagefactory.toml").read_text()
    write_settings(root, f'registry = "{bench.registry.host}"\n{text}')
    image = bench.push(b"a", 1)
    add_program(bench, made, "other", "stranger", command="rotate")  # from a file to a program
    bench.verify(image)
    bench.promote()
    bench.call("site", "publish")
    trust = read_trust(bench.factory.settings.files)
    current = read_current(current_place(bench.factory, ""), trust, datetime.now(UTC))
    assert current
    assert current.catalog
    assert current.catalog.images
    assert current.keyid == STRANGER.keyid
    assert (keys_directory(bench.factory.environ) / "other.command").exists()
    bench.call("verdict", "revoke", "one-12.1-cu121", "--reason", "a test")
    assert "12.1-cu121" not in bench.tags
    acts = [row["action"] for row in json_of(bench.call("key", "log", "--json"), "key-log")["entries"]]
    assert {"rotate", "sign", "promote", "publish", "revoke"} <= set(acts)
    bench.call("key", "rotate", code=EXIT_USAGE)  # its successor would be a file
    stranger = str(bench.folder / "stranger.public")
    bench.call("key", "rotate", "--command", "true", "--public", stranger, code=EXIT_USAGE)  # the same key
    assert len(own_keys(keys_directory(bench.factory.environ))) == 2
    add_program(bench, made, "third", "lab", command="rotate")
    assert bench.call("site", "publish").code == 0


def test_command_and_public_belong_together(bench: Bench) -> None:
    for words in (("--command", "true"), ("--public", "x.pub")):
        bench.call("key", "create", "third", *words, code=EXIT_USAGE)
    assert not list(keys_directory(bench.factory.environ).glob("third*"))


@pytest.fixture
def agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A real ssh-agent, empty; it ends with the test."""
    address = Path(os.environ.get("TMPDIR", "/tmp")) / f"agent-{os.getpid()}"  # a socket's name is short
    keeper = subprocess.Popen(["ssh-agent", "-D", "-a", str(address)], stdout=subprocess.DEVNULL)
    try:
        while not address.exists():
            assert keeper.poll() is None
            time.sleep(0.01)
        monkeypatch.setenv("SSH_AUTH_SOCK", str(address))
        yield
    finally:
        keeper.terminate()
        keeper.wait()
        address.unlink(missing_ok=True)


@pytest.mark.usefixtures("agent")
def test_the_example_signs_by_ssh_agent(bench: Bench, tmp_path: Path) -> None:
    key = Ed25519PrivateKey.generate()
    private, public = tmp_path / "id", tmp_path / "id.pub"
    private.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption()))
    private.chmod(0o600)
    public.write_bytes(key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH))
    command = shlex.join([sys.executable, str(SSH_AGENT), str(public)])
    words = ("key", "create", "ssh", "--command", command, "--public", str(public), "--json")
    bench.call(*words, code=6)  # the agent does not hold it yet
    subprocess.run(["ssh-add", "-q", str(private)], check=True, stdin=subprocess.DEVNULL)
    private.unlink()
    said = json_of(bench.call(*words), "key-create")
    assert (said["name"], said["private"]) == ("ssh", None)
    sealed = sign_envelope(b"{}" + b" " * (1 << 17), read_signing_key(Path(said["command"])))
    raw = key.public_key().public_bytes(Encoding.Raw, PublicFormat.Raw)
    assert json.loads(sealed)["signatures"][0]["keyid"] == said["keyid"]
    assert is_signed_by(parse_envelope(sealed, "x"), said["keyid"], raw)


def test_the_example_names_an_agent_that_does_not_answer(tmp_path: Path) -> None:
    public, address = tmp_path / "id.pub", tmp_path / "agent"
    public.write_bytes(
        Ed25519PrivateKey.generate().public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
    )
    done = subprocess.run(
        [sys.executable, str(SSH_AGENT), str(public)],
        env={"SSH_AUTH_SOCK": str(address)},
        input=b"x",
        capture_output=True,
        check=False,
    )
    (line,) = done.stderr.decode().splitlines()
    assert (done.returncode, done.stdout) == (1, b"")
    assert str(address) in line
