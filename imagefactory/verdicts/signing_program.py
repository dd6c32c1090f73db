"""A signing program: it signs with a key that imagefactory never sees (a token, ssh-agent, a cloud's KMS).

    stdin     the bytes to sign: a DSSE pre-authentication encoding, `DSSEv1 ...`
    stdout    the Ed25519 signature (RFC 8032, pure): its 64 bytes, or those in base64
    exit      0 with a signature; any other code with the reason as the last line of stderr
    limits    SECONDS for one signature, LARGEST_OUTPUT bytes of stdout
    started   without a shell, in `/`, with the caller's environment and terminal; one at a time

Each signature is checked with the recorded public key before it is used. After a failure the program is not
started again by that process: a program that hangs would hang for each of a thousand verdicts.

The command is read from the user's own folder of keys and nowhere else: no setting and no project gives one.
"""

from __future__ import annotations

import base64
import binascii
import functools
import json
import os
import selectors
import shlex
import shutil
import subprocess
import tempfile
import tomllib
from collections.abc import Mapping
from pathlib import Path
from threading import Lock
from time import monotonic
from typing import IO

from imagefactory.serialize import shown, shown_line
from imagefactory.errors import StatementError, ToolError, UsageError

SECONDS = 60.0
"""For one signature: a person may have to enter a PIN or touch a token."""
LARGEST_OUTPUT = 1024
_LARGEST_STDERR = 1 << 16
_SIGNATURE_BYTES = 64
_TICK = 0.05
_OUTPUT = "it must print 64 bytes, or those in base64, and nothing else"
CHECK = b"imagefactory checks this signing program"
"""What `keys new --command` has signed. It is not a DSSE encoding, so it is a signature of nothing."""


def find_command(text: str, environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return the words of `--command`, the program by its absolute path. Raises UsageError."""
    try:
        program, *arguments = shlex.split(text)
    except ValueError as error:
        reason = str(error) if text.strip() else "it is empty"
        raise UsageError(
            "option-invalid",
            f"--command is not a valid command: {reason}",
            hint="write --command 'PROGRAM ARGUMENT ...'",
        ) from error
    found = shutil.which(program, path=environ.get("PATH", os.defpath))
    if found is None:
        raise UsageError(
            "signing-program-missing",
            f"--command: '{shown(program)}' is neither an executable file nor a program on PATH",
            hint="write its absolute path",
        )
    return (str(Path(found).absolute()), *arguments)


def format_command(command: tuple[str, ...]) -> bytes:
    """The text of a file NAME.command."""
    words = ", ".join(json.dumps(word, ensure_ascii=False).replace("\x7f", "\\u007f") for word in command)
    return f"command = [{words}]\n".encode()


def parse_command(data: bytes, where: Path) -> tuple[str, ...]:
    """What `format_command` wrote, or a person. Raises StatementError."""
    try:
        document = tomllib.loads(data.decode())
    except (ValueError, RecursionError) as error:
        raise StatementError(
            "signing-program-invalid",
            f"{where} is not valid TOML: {shown(str(error))}",
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
            f"{where} does not name a program by its absolute path",
            hint='write one line: command = ["/PROGRAM", "ARGUMENT", ...]',
        )
    return tuple(words)


class SigningProgram:
    """Signs by a program. `public` is the raw key that its signatures must fit, `name` the key's."""

    def __init__(self, name: str, command: tuple[str, ...], public: bytes) -> None:
        self._name, self._command, self._public = name, command, public
        self._lock = Lock()
        self._fault: ToolError | None = None

    def sign(self, data: bytes, *, seconds: float = SECONDS) -> bytes:
        """Return the signature of `data`. Raises ToolError for a program that does not give it."""
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

        code, output, told = self._run(data, monotonic() + seconds, seconds)
        if code:
            ended = f"was killed by signal {-code}" if code < 0 else f"failed with exit code {code}"
            lines = told.decode("utf-8", "replace").strip().splitlines() or ["it printed no reason to stderr"]
            problem = self._problem(f"{ended}: {shown(shown_line(lines[-1]))}")
            raise ToolError("signing-program-failed", problem, hint=self._try)
        signature = _read_signature(output)
        if len(signature) != _SIGNATURE_BYTES:
            raise ToolError(
                "signing-program-output",
                self._problem(f"printed {len(output)} bytes that are not a signature"),
                hint=_OUTPUT,
            )
        try:
            Ed25519PublicKey.from_public_bytes(self._public).verify(signature, data)
        except InvalidSignature:
            raise ToolError(
                "signature-mismatch",
                self._problem("printed a signature that does not match the recorded public key"),
                hint="it must sign stdin unchanged by pure Ed25519, with the key of the .pub file",
            ) from None
        return signature

    def _run(self, data: bytes, end: float, seconds: float) -> tuple[int, bytes, bytes]:
        """Start the program; return its exit code, what it printed, and the beginning of its stderr."""
        try:
            with tempfile.TemporaryFile() as given:  # no pipe that it may leave unread
                given.write(data)
                given.seek(0)
                process = subprocess.Popen(
                    self._command, stdin=given, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd="/"
                )
        except OSError as error:
            problem = self._problem(f"cannot be started: {error.strerror}")
            raise ToolError("signing-program-failed", problem, hint=self._try) from error
        try:
            output, told = self._read(process, end, seconds)
            code = process.wait(max(0.0, end - monotonic()))
        except subprocess.TimeoutExpired:
            raise self._late(seconds) from None
        finally:
            process.kill()  # it alone: in a session of its own it could not ask for a PIN
            process.wait()
            for pipe in (process.stdout, process.stderr):
                if pipe:
                    pipe.close()
        return code, output, told

    def _read(self, process: subprocess.Popen[bytes], end: float, seconds: float) -> tuple[bytes, bytes]:
        read: dict[IO[bytes] | None, bytes] = {process.stdout: b"", process.stderr: b""}
        with selectors.DefaultSelector() as selector:
            for pipe in read:
                if pipe:
                    selector.register(pipe, selectors.EVENT_READ, pipe)
            while selector.get_map():
                ended = process.poll() is not None
                ready = selector.select(_TICK)
                if ended and not ready:  # something that it started holds a pipe
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
                    raise ToolError(
                        "signing-program-output",
                        self._problem(f"printed more than {LARGEST_OUTPUT} bytes to stdout"),
                        hint=_OUTPUT,
                    )
        return read[process.stdout], read[process.stderr]

    def _late(self, seconds: float) -> ToolError:
        problem = self._problem(f"did not finish within {seconds:g} seconds and was killed")
        return ToolError("signing-program-timeout", problem, hint=self._try)

    def _problem(self, what: str) -> str:
        program = shown(shlex.quote(self._command[0]))
        return f"the signing program of '{self._name}' ({program}) {what}"

    @property
    def _try(self) -> str:
        return f"nothing was signed; test it: printf x | {shown(shlex.join(self._command))} | wc -c"


@functools.cache
def signing_program(name: str, command: tuple[str, ...], public: bytes) -> SigningProgram:
    """The one of this process, which remembers a failure for all that have to be signed."""
    return SigningProgram(name, command, public)


def _read_signature(output: bytes) -> bytes:
    """The bytes of a signature, printed as they are or in base64; empty for neither."""
    if len(output) == _SIGNATURE_BYTES:
        return output
    try:
        return base64.b64decode(output.strip(), validate=True)
    except binascii.Error:
        return b""
