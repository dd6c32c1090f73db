"""The user's Ed25519 keys: create, find, and read them. Only the owner can read a private key (PKCS8 PEM).

`$XDG_CONFIG_HOME/imagefactory/keys/NAME.pem` is the private key, `NAME.pub` in the same directory the public
key. Instead of NAME.pem, there may be NAME.command, which names a signing program. Creating a key and signing
require the package `cryptography`; reading a public key does not.
"""

from __future__ import annotations

import base64
import binascii
import functools
import hashlib
import json
import os
import re
import selectors
import shlex
import shutil
import stat
import subprocess
import tempfile
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from threading import Lock
from time import monotonic
from typing import IO

from imagefactory.errors import StatementError, ToolError, UsageError, os_problem, os_reason
from imagefactory.fs import create_bytes, replacing
from imagefactory.serialize import printable_line, printable_value

# --- A signing program: it signs with a key that imagefactory never sees (a token, ssh-agent, a cloud's KMS)
#     stdin     the bytes to sign: a DSSE pre-authentication encoding, `DSSEv1 ...`
#     stdout    the Ed25519 signature (RFC 8032, pure): its 64 bytes, or those in base64
#     exit      0 with a signature; any other code with the reason as the last line of stderr
#     limits    SECONDS for one signature, LARGEST_OUTPUT bytes of stdout
#     started   without a shell, in `/`, with the caller's environment and terminal; one at a time
# Each signature is checked with the recorded public key before it is used. After a failure the process does
# not start the program again: a program that hangs would hang for each of a thousand verdicts. The command is
# only read from the user's own keys directory, never from a setting or a project.

SECONDS = 60.0
"""The time limit in seconds of one signature: a person may have to enter a PIN or touch a token."""
LARGEST_OUTPUT = 1024
_LARGEST_STDERR = 1 << 16
_SIGNATURE_BYTES = 64
_TICK = 0.05
_OUTPUT = "it must print 64 bytes, or those in base64, and nothing else"
CHECK = b"imagefactory checks this signing program"
"""The bytes that `key create --command` signs as a test.

They are not a DSSE encoding, so they sign no statement.
"""


def find_command(text: str, environ: Mapping[str, str]) -> tuple[str, ...]:
    """Split the value of `--command` into words, with the absolute path of the program. Raises UsageError."""
    try:
        program, *arguments = shlex.split(text)
    except ValueError as error:
        reason = str(error) if text.strip() else "it is empty"
        raise UsageError(
            "option-invalid",
            f"--command is not a valid command: {reason}",
            hint="write --command 'PROGRAM ARGUMENT ...'",
        ) from error
    path = shutil.which(program, path=environ.get("PATH", os.defpath))
    if path is None:
        raise UsageError(
            "signing-program-missing",
            f"--command: '{printable_value(program)}' is neither an executable file nor a program on PATH",
            hint="write its absolute path",
        )
    return (str(Path(path).absolute()), *arguments)


def format_command(command: tuple[str, ...]) -> bytes:
    """Return the text of a file NAME.command."""
    words = ", ".join(json.dumps(word, ensure_ascii=False).replace("\x7f", "\\u007f") for word in command)
    return f"command = [{words}]\n".encode()


def parse_command(data: bytes, location: Path) -> tuple[str, ...]:
    """Parse a file NAME.command. Raises StatementError."""
    try:
        document = tomllib.loads(data.decode())
    except (ValueError, RecursionError) as error:
        raise StatementError(
            "signing-program-invalid",
            f"{location} is not valid TOML: {printable_value(str(error))}",
            hint='write one line: command = ["/PROGRAM", "ARGUMENT", ...]',
        ) from error
    words = document.get("command")
    if (
        set(document) != {"command"}
        or not isinstance(words, list)
        or not words
        or not all(isinstance(word, str) and "\0" not in word for word in words)
        or not Path(words[0]).is_absolute()
    ):
        raise StatementError(
            "signing-program-invalid",
            f"{location} does not name a program by its absolute path",
            hint='write one line: command = ["/PROGRAM", "ARGUMENT", ...]',
        )
    return tuple(words)


class SigningProgram:
    """A program that signs. Its signatures must match the raw key `public`; `name` is the name of the key."""

    def __init__(self, name: str, command: tuple[str, ...], public: bytes) -> None:
        self._name, self._command, self._public = name, command, public
        self._lock = Lock()
        self._fault: ToolError | None = None

    def sign(self, data: bytes, *, seconds: float = SECONDS) -> bytes:
        """Return the signature of `data`.

        Raises ToolError if the program fails or needs more than `seconds`.
        """
        with self._lock:
            if self._fault is None:
                try:
                    return self._sign(data, seconds)
                except ToolError as error:
                    self._fault = error
            raise self._fault

    def _sign(self, data: bytes, seconds: float) -> bytes:
        from cryptography.exceptions import InvalidSignature
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

        code, output, message = self._run(data, monotonic() + seconds, seconds)
        if code:
            ended = f"was killed by signal {-code}" if code < 0 else f"failed with exit code {code}"
            lines = message.decode("utf-8", "replace").strip().splitlines()
            last = lines[-1] if lines else "it printed no reason to stderr"
            problem = self._problem(f"{ended}: {printable_value(printable_line(last))}")
            raise ToolError("signing-program-failed", problem, hint=self._try)
        signature = _read_signature(output)
        if len(signature) != _SIGNATURE_BYTES:
            problem = self._problem(f"printed {len(output)} bytes that are not a signature")
            raise ToolError("signing-program-output", problem, hint=_OUTPUT)
        try:
            Ed25519PublicKey.from_public_bytes(self._public).verify(signature, data)
        except InvalidSignature:
            problem = self._problem("printed a signature that does not match the recorded public key")
            hint = "it must sign stdin unchanged by pure Ed25519, with the key of the .pub file"
            raise ToolError("signature-mismatch", problem, hint=hint) from None
        return signature

    def _run(self, data: bytes, end: float, seconds: float) -> tuple[int, bytes, bytes]:
        """Run the program. Return its exit code, its stdout, and the beginning of its stderr."""
        try:
            with tempfile.TemporaryFile() as stdin:  # not a pipe, which it might leave unread
                stdin.write(data)
                stdin.seek(0)
                process = subprocess.Popen(
                    self._command, stdin=stdin, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd="/"
                )
        except OSError as error:
            problem = self._problem(f"cannot be started: {os_reason(error)}")
            raise ToolError("signing-program-failed", problem, hint=self._try) from error
        try:
            output, message = self._read(process, end, seconds)
            code = process.wait(max(0.0, end - monotonic()))
        except subprocess.TimeoutExpired:
            raise self._late(seconds) from None
        finally:
            process.kill()  # only this process: in its own session it could not prompt for a PIN
            process.wait()
            for pipe in (process.stdout, process.stderr):
                if pipe:
                    pipe.close()
        return code, output, message

    def _read(self, process: subprocess.Popen[bytes], end: float, seconds: float) -> tuple[bytes, bytes]:
        read: dict[IO[bytes] | None, bytes] = {process.stdout: b"", process.stderr: b""}
        with selectors.DefaultSelector() as selector:
            for pipe in read:
                if pipe:
                    selector.register(pipe, selectors.EVENT_READ, pipe)
            while selector.get_map():
                ended = process.poll() is not None
                ready = selector.select(_TICK)
                if ended and not ready:  # a child process has a pipe open
                    break
                if monotonic() > end:
                    raise self._late(seconds)
                for key, _ in ready:
                    data = os.read(key.fd, 1 << 16)
                    if not data:
                        selector.unregister(key.fileobj)
                    elif len(read[key.data]) < _LARGEST_STDERR:
                        read[key.data] += data
                if len(read[process.stdout]) > LARGEST_OUTPUT:
                    problem = self._problem(f"printed more than {LARGEST_OUTPUT} bytes to stdout")
                    raise ToolError("signing-program-output", problem, hint=_OUTPUT)
        return read[process.stdout], read[process.stderr]

    def _late(self, seconds: float) -> ToolError:
        problem = self._problem(f"did not finish within {seconds:g} seconds and was killed")
        return ToolError("signing-program-timeout", problem, hint=self._try)

    def _problem(self, message: str) -> str:
        program = printable_value(shlex.quote(self._command[0]))
        return f"the signing program of '{self._name}' ({program}) {message}"

    @property
    def _try(self) -> str:
        return f"nothing was signed; test it: printf x | {printable_value(shlex.join(self._command))} | wc -c"


@functools.cache
def signing_program(name: str, command: tuple[str, ...], public: bytes) -> SigningProgram:
    """Return the signing program, one object per process: after a failure it fails for all later
    signatures.
    """
    return SigningProgram(name, command, public)


def _read_signature(output: bytes) -> bytes:
    """Return the signature in the output, raw or in base64. The result is empty for other output."""
    if len(output) == _SIGNATURE_BYTES:
        return output
    try:
        return base64.b64decode(output.strip(), validate=True)
    except binascii.Error:
        return b""


FILE, PROGRAM = ".pem", ".command"
"""The two ways to sign with the key NAME: the file NAME.pem, or the program in NAME.command."""
NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")
LARGEST_FILE = 1 << 16
PUBLIC_BYTES = 32
NEVER = datetime.min.replace(tzinfo=UTC)

Period = tuple[datetime, datetime]
"""The period in which a key is trusted: start and end."""

# RFC 8410: SubjectPublicKeyInfo of an Ed25519 key is these bytes and then the key's 32.
_DER = bytes.fromhex("302a300506032b6570032100")
# The 8 points whose order divides 8, by their y. Such a key accepts forged signatures.
_FIELD = 2**255 - 19
_OF_ORDER_8 = 2707385501144840649318225287225658788936804267575313519463743609750303402022
_SMALL = {0, 1, _FIELD - 1, _OF_ORDER_8, _FIELD - _OF_ORDER_8}
_SSH = re.compile(rb"ssh-ed25519[ \t]+([A-Za-z0-9+/=]+)(?:[ \t][^\r\n]*)?\s*")
_SSH_HEAD = b"\0\0\0\x0bssh-ed25519\0\0\0\x20"  # RFC 8709: the type and the key, each after its length
_PEM = re.compile(rb"-----BEGIN PUBLIC KEY-----\s+([A-Za-z0-9+/=\s]+?)\s*-----END PUBLIC KEY-----\s*")


@dataclass(frozen=True, slots=True, kw_only=True)
class PublicKey:
    """A public key. `name` is the name of its file, `raw` has 32 bytes."""

    name: str
    raw: bytes

    @property
    def keyid(self) -> str:
        return keyid_of(self.raw)


@dataclass(frozen=True, slots=True, kw_only=True)
class SigningKey:
    """A private key in a file or in a signing program. It is never printed.

    `sign` returns a signature of 64 bytes. It raises ToolError if a program fails.
    """

    name: str
    public: bytes
    sign: Callable[[bytes], bytes]

    @property
    def keyid(self) -> str:
        return keyid_of(self.public)


def keyid_of(public: bytes) -> str:
    """Return the id of a key as securesystemslib computes it: the sha256 of the canonical JSON of the key."""
    text = f'{{"keytype":"ed25519","keyval":{{"public":"{public.hex()}"}},"scheme":"ed25519"}}'
    return hashlib.sha256(text.encode("ascii")).hexdigest()


def keys_directory(environ: Mapping[str, str]) -> Path:
    home = Path(environ.get("HOME") or "/")
    return Path(environ.get("XDG_CONFIG_HOME") or home / ".config") / "imagefactory" / "keys"


def check_name(name: str) -> str:
    if not NAME.fullmatch(name):
        raise UsageError(
            "key-name-invalid",
            f"'{name}' is not a valid key name",
            hint="use at most 64 lowercase letters, digits, '.', '_' and '-'",
        )
    return name


def make_key(directory: Path, name: str) -> PublicKey:
    """Write NAME.pem (mode 0600) and NAME.pub. Raises UsageError if the name exists."""
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import (
        Encoding,
        NoEncryption,
        PrivateFormat,
        PublicFormat,
    )

    check_name(name)
    private = Ed25519PrivateKey.generate()
    pem = private.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    raw = private.public_key().public_bytes(Encoding.Raw, PublicFormat.Raw)
    return _write_key(directory / f"{name}{FILE}", pem, raw)


def record_program(
    directory: Path, name: str, command: str, public: PublicKey, environ: Mapping[str, str]
) -> PublicKey:
    """Check that the program signs for this public key, then write NAME.command (mode 0600) and NAME.pub.

    Raises UsageError like `make_key` and for an invalid command, ToolError for a wrong signature.
    """
    path = directory / f"{check_name(name)}{PROGRAM}"
    _check_unique(path)
    words = find_command(command, environ)
    SigningProgram(name, words, public.raw).sign(CHECK)
    return _write_key(path, format_command(words), public.raw)


def _write_key(path: Path, data: bytes, raw: bytes) -> PublicKey:
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    _check_unique(path)
    created = False
    try:
        with replacing(path.with_suffix(".pub"), durable=True) as file:
            file.write(format_public(raw))
            file.flush()
            created = create_bytes(path, data, mode=0o600)
            if not created:
                raise _name_exists_error(path)
    except OSError:
        if created:  # a private key without its public half is useless, and no one has seen it
            path.unlink()
        raise
    return PublicKey(name=path.stem, raw=raw)


def _check_unique(path: Path) -> None:
    for other in (path.with_suffix(suffix) for suffix in (FILE, PROGRAM)):
        if os.path.lexists(other):
            raise _name_exists_error(other)


def _name_exists_error(path: Path) -> UsageError:
    return UsageError(
        "key-exists", f"the key '{path.stem}' already exists: {path}", hint="choose another name"
    )


def find_key(
    setting: str, environ: Mapping[str, str], times: Mapping[str, Period] | None = None, now: datetime = NEVER
) -> Path | None:
    """Return the file of the signing key or program, None if there is none.

    `setting` is the value of `signing-key`: a path, or a name in the keys directory. A path cannot name a
    program, because a project may set it. Without the setting, the newest key in that directory that is
    trusted at `now` signs; `times` are the periods of trusted keys by their ids. If there is only one key, it
    is returned even if it is not trusted. Raises UsageError if several keys could sign.
    """
    directory = keys_directory(environ)
    if setting:
        named = NAME.fullmatch(setting) and not setting.endswith(FILE)
        path = _signers(directory).get(setting, directory / f"{setting}{FILE}") if named else Path(setting)
        if not named and path.suffix == PROGRAM:
            raise UsageError(
                "signing-key-invalid",
                f"signing-key: {path} names a program, which is only allowed in {directory}",
                hint="run imagefactory key create NAME --command ... --public ..., and write that name",
            )
        if not path.is_file():
            raise UsageError(
                "signing-key-not-found",
                f"signing-key: {path} is not a file",
                hint="set the file of a key, or create one: imagefactory key create NAME",
            )
        return path
    paths = _signers(directory)
    if len(paths) < 2:
        return next(iter(paths.values()), None)
    known = times or {}
    keys = own_keys(directory)
    valid = [key for key in keys if key.keyid in known and known[key.keyid][0] <= now < known[key.keyid][1]]
    newest = max((known[key.keyid][0] for key in valid), default=NEVER)
    chosen = [key.name for key in valid if known[key.keyid][0] == newest]
    if len(chosen) == 1:
        return paths[chosen[0]]
    if chosen:
        raise UsageError(
            "signing-key-ambiguous",
            f"the keys {' and '.join(chosen)} have the same start date, so imagefactory cannot choose one",
            hint=f'write signing-key = "{chosen[-1]}" in imagefactory.toml, or retire one of them',
        )
    fresh = [key.name for key in keys if key.keyid not in known]
    raise UsageError(
        "no-trusted-signing-key",
        f"{directory} has {len(paths)} keys, but none of them is trusted now",
        hint=f"trust the one that signs: imagefactory key trust {fresh[-1] if fresh else 'NAME'}",
    )


def _signers(directory: Path) -> dict[str, Path]:
    """Return the files of signing keys in this directory, by name. Raises UsageError for a duplicate name."""
    paths: dict[str, Path] = {}
    for path in sorted(path for suffix in (FILE, PROGRAM) for path in directory.glob(f"*{suffix}")):
        if path.stem in paths:
            raise UsageError(
                "key-duplicate",
                f"{paths[path.stem]} and {path} are keys with the same name",
                hint="delete the one that does not sign",
            )
        paths[path.stem] = path
    return paths


def read_signing_key(path: Path) -> SigningKey:
    """Read a key.

    Raises StatementError if other users can read the file, or if it is not an Ed25519 key (PKCS8 PEM).

    A signing program is not started.
    """
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_pem_private_key

    if path.suffix == PROGRAM:
        return _read_program(path)
    data = _read_private(path)
    try:
        private = load_pem_private_key(data, password=None)
    except (ValueError, TypeError) as error:
        raise StatementError(
            "private-key-invalid",
            f"{path} is not a private key without a password",
            hint="create one: imagefactory key create NAME",
        ) from error
    if not isinstance(private, Ed25519PrivateKey):
        raise StatementError(
            "private-key-invalid",
            f"{path} is not an Ed25519 key",
            hint="create one: imagefactory key create NAME",
        )
    raw = private.public_key().public_bytes(Encoding.Raw, PublicFormat.Raw)
    return SigningKey(name=path.stem, public=raw, sign=private.sign)


def _read_program(path: Path) -> SigningKey:
    command = parse_command(_read_private(path, program=True), path)
    raw = read_public(path.stem, path.parent).raw
    return SigningKey(name=path.stem, public=raw, sign=signing_program(path.stem, command, raw).sign)


def _read_private(path: Path, *, program: bool = False) -> bytes:
    """Read the file of a key or program.

    Raises StatementError if other users can read it, or own a program's file.
    """
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise StatementError(
            *os_problem("read", path, error), hint="set the file of a key: IMAGEFACTORY_SIGNING_KEY"
        ) from error
    facts = os.fstat(handle)
    if not stat.S_ISREG(facts.st_mode):
        os.close(handle)
        raise StatementError(
            "private-key-invalid",
            f"{path} is not a regular file",
            hint="set the file of a key: signing-key or IMAGEFACTORY_SIGNING_KEY",
        )
    with os.fdopen(handle, "rb") as file:
        if facts.st_mode & 0o077:
            hint = f"chmod 600 {path}; if others could read it, create a new key and retire this one"
            raise StatementError(
                "private-key-exposed",
                f"other users can read or write {path} (mode {stat.S_IMODE(facts.st_mode):o})",
                hint=f"check its content, then: chmod 600 {path}" if program else hint,
            )
        if program and facts.st_uid not in (0, os.geteuid()):
            raise StatementError(
                "signing-program-foreign",
                f"{path} belongs to another user, who could choose the program that runs",
                hint="create another one: imagefactory key create NAME --command ... --public ...",
            )
        return file.read(LARGEST_FILE)


def format_public(raw: bytes) -> bytes:
    """Return the public key `raw` in PEM."""
    text = base64.b64encode(_DER + raw).decode("ascii")
    return f"-----BEGIN PUBLIC KEY-----\n{text}\n-----END PUBLIC KEY-----\n".encode("ascii")


def parse_public(data: bytes, name: str) -> PublicKey:
    """Parse a public key in PEM, in the format of ssh (`ssh-ed25519 AAAA...`), or as base64 of its 32 bytes.

    Raises UsageError for other data.
    """
    pem, ssh = _PEM.fullmatch(data), _SSH.fullmatch(data)
    match, head = pem or ssh, _DER if pem else _SSH_HEAD
    try:
        raw = base64.b64decode(b"".join((match[1] if match else data).split()), validate=True)
    except binascii.Error:
        raw = b""
    if match:
        raw = raw[len(head) :] if raw.startswith(head) else b""
    if len(raw) != PUBLIC_BYTES:
        private = ", but a private one" if b"PRIVATE KEY" in data else ""
        raise UsageError(
            "public-key-invalid",
            f"{name} is not a public Ed25519 key{private}",
            hint="use the .pub file that imagefactory key create wrote",
        )
    y = int.from_bytes(raw, "little") & ~(1 << 255)
    if y >= _FIELD or y in _SMALL:
        raise UsageError(
            "public-key-weak",
            f"{name} is a weak key: it accepts forged signatures",
            hint="create another key: imagefactory key create NAME",
        )
    return PublicKey(name=name, raw=raw)


def read_public(text: str, directory: Path) -> PublicKey:
    """Return the public key of a file, or of a key name in the keys directory. Raises UsageError."""
    known = directory / f"{text}.pub"
    path = known if NAME.fullmatch(text) and known.is_file() else Path(text)
    try:
        with path.open("rb") as file:
            data = file.read(LARGEST_FILE)
    except OSError as error:
        raise UsageError(
            "key-not-found",
            f"'{text}' is neither a file nor a key in {directory}",
            hint="list the keys: imagefactory key list",
        ) from error
    return parse_public(data, path.stem)


def own_keys(directory: Path) -> tuple[PublicKey, ...]:
    """Return the ids of the keys that can sign here, by name. Keys without a .pub file are skipped."""
    return tuple(
        parse_public(path.read_bytes()[:LARGEST_FILE], path.stem)
        for path in sorted(directory.glob("*.pub"))
        if any(path.with_suffix(suffix).exists() for suffix in (FILE, PROGRAM))
    )
