"""Keys of this user: made, found, read. Ed25519, a private one in PKCS8 PEM that only its owner can read.

`$XDG_CONFIG_HOME/imagefactory/keys/NAME.pem` is the private key, `NAME.pub` next to it the public one, which
may be given to anybody. Instead of NAME.pem there may be NAME.command: the program that signs
(signing_program.py). Making a key and signing need `cryptography`; reading a public one does not.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import os
import re
import stat
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from imagefactory.errors import StatementError, UsageError, os_problem
from imagefactory.fs import create_bytes, replacing
from imagefactory.verdicts.signing_program import (
    CHECK,
    SigningProgram,
    find_command,
    format_command,
    parse_command,
    signing_program,
)

FILE, PROGRAM = ".pem", ".command"
"""What signs with the key NAME: the file NAME.pem has it, or NAME.command names a program."""
NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")
LARGEST_FILE = 1 << 16
PUBLIC_BYTES = 32
NEVER = datetime.min.replace(tzinfo=UTC)

Period = tuple[datetime, datetime]
"""From when a key is trusted, and until when."""

# RFC 8410: SubjectPublicKeyInfo of an Ed25519 key is these bytes and then the key's 32.
_DER = bytes.fromhex("302a300506032b6570032100")
# The 8 points whose order divides 8, by their y. A key of them fits signatures that nobody made.
_FIELD = 2**255 - 19
_OF_ORDER_8 = 2707385501144840649318225287225658788936804267575313519463743609750303402022
_SMALL = {0, 1, _FIELD - 1, _OF_ORDER_8, _FIELD - _OF_ORDER_8}
_SSH = re.compile(rb"ssh-ed25519[ \t]+([A-Za-z0-9+/=]+)(?:[ \t][^\r\n]*)?\s*")
_SSH_HEAD = b"\0\0\0\x0bssh-ed25519\0\0\0\x20"  # RFC 8709: the type and the key, each after its length
_PEM = re.compile(rb"-----BEGIN PUBLIC KEY-----\s+([A-Za-z0-9+/=\s]+?)\s*-----END PUBLIC KEY-----\s*")


@dataclass(frozen=True, slots=True, kw_only=True)
class PublicKey:
    """`name` is the file's; `raw` the 32 bytes."""

    name: str
    raw: bytes

    @property
    def keyid(self) -> str:
        return keyid_of(self.raw)


@dataclass(frozen=True, slots=True, kw_only=True)
class SigningKey:
    """A private key, ready to sign: of a file, or behind a program. Nothing of it is ever shown.

    `sign` returns the 64 bytes of a signature. Raises ToolError for a program that does not give it.
    """

    name: str
    public: bytes
    sign: Callable[[bytes], bytes]

    @property
    def keyid(self) -> str:
        return keyid_of(self.public)


def keyid_of(public: bytes) -> str:
    """The key's id as securesystemslib computes it: the sha256 of its canonical JSON, 64 hex digits."""
    text = f'{{"keytype":"ed25519","keyval":{{"public":"{public.hex()}"}},"scheme":"ed25519"}}'
    return hashlib.sha256(text.encode("ascii")).hexdigest()


def keys_folder(environ: Mapping[str, str]) -> Path:
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


# --- making and finding --------------------------------------------------------------------------


def make_key(folder: Path, name: str) -> PublicKey:
    """Writes NAME.pem (0600) and NAME.pub. Raises UsageError where one of that name is there already."""
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
    return _write_key(folder / f"{name}{FILE}", pem, raw)


def record_program(
    folder: Path, name: str, command: str, public: PublicKey, environ: Mapping[str, str]
) -> PublicKey:
    """Writes NAME.command (0600) and NAME.pub, once that program has signed for that public key.

    Raises UsageError as `make_key` does and for a command that is not one, ToolError for a wrong signature.
    """
    path = folder / f"{check_name(name)}{PROGRAM}"
    _refuse_second(path)
    words = find_command(command, environ)
    SigningProgram(name, words, public.raw).sign(CHECK)
    return _write_key(path, format_command(words), public.raw)


def _write_key(path: Path, data: bytes, raw: bytes) -> PublicKey:
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    _refuse_second(path)
    made = False
    try:
        with replacing(path.with_suffix(".pub"), durable=True) as file:
            file.write(format_public(raw))
            file.flush()
            made = create_bytes(path, data, mode=0o600)
            if not made:
                raise _taken(path)
    except OSError:
        if made:  # one without its public half is of no use, and nobody has seen it
            path.unlink()
        raise
    return PublicKey(name=path.stem, raw=raw)


def _refuse_second(path: Path) -> None:
    for other in (path.with_suffix(suffix) for suffix in (FILE, PROGRAM)):
        if os.path.lexists(other):
            raise _taken(other)


def _taken(path: Path) -> UsageError:
    return UsageError(
        "key-exists", f"the key '{path.stem}' already exists: {path}", hint="choose another name"
    )


def find_key(
    setting: str, environ: Mapping[str, str], times: Mapping[str, Period] | None = None, now: datetime = NEVER
) -> Path | None:
    """Return what signs here, None if nothing does: the file of a private key, or that names a program.

    `setting` is the value of `signing-key`: a path, or a name in the folder of keys. A path never names a
    program, for it may be one of somebody's project. Without the setting, the newest
    key of that folder that is trusted `now` signs; `times` are the periods of trusted keys by their ids. A
    single key is returned even if it is not trusted. Raises UsageError if several keys could sign.
    """
    folder = keys_folder(environ)
    if setting:
        named = NAME.fullmatch(setting) and not setting.endswith(FILE)
        path = _signers(folder).get(setting, folder / f"{setting}{FILE}") if named else Path(setting)
        if not named and path.suffix == PROGRAM:
            raise UsageError(
                "signing-key-invalid",
                f"signing-key: {path} names a program, which is only allowed in {folder}",
                hint="run imagefactory keys new NAME --command ... --public ..., and write that name",
            )
        if not path.is_file():
            raise UsageError(
                "signing-key-not-found",
                f"signing-key: {path} is not a file",
                hint="set the file of a key, or create one: imagefactory keys new NAME",
            )
        return path
    paths = _signers(folder)
    if len(paths) < 2:
        return next(iter(paths.values()), None)
    known = times or {}
    own = own_keys(folder)
    valid = [key for key in own if key.keyid in known and known[key.keyid][0] <= now < known[key.keyid][1]]
    newest = max((known[key.keyid][0] for key in valid), default=NEVER)
    chosen = [key.name for key in valid if known[key.keyid][0] == newest]
    if len(chosen) == 1:
        return paths[chosen[0]]
    if chosen:
        raise UsageError(
            "signing-key-ambiguous",
            f"the keys {' and '.join(chosen)} are trusted since the same time, so either could sign",
            hint=f'write signing-key = "{chosen[-1]}" in imagefactory.toml, or retire one of them',
        )
    fresh = [key.name for key in own if key.keyid not in known]
    raise UsageError(
        "no-trusted-signing-key",
        f"{folder} has {len(paths)} keys, but none of them is trusted now",
        hint=f"trust the one that signs: imagefactory keys trust {fresh[-1] if fresh else 'NAME'}",
    )


def _signers(folder: Path) -> dict[str, Path]:
    """What signs with the keys of this folder, by the keys' names. Raises UsageError for two of one name."""
    found: dict[str, Path] = {}
    for path in sorted(path for suffix in (FILE, PROGRAM) for path in folder.glob(f"*{suffix}")):
        if path.stem in found:
            raise UsageError(
                "key-duplicate",
                f"{found[path.stem]} and {path} have the same name",
                hint="delete the one that does not sign",
            )
        found[path.stem] = path
    return found


def read_signing_key(path: Path) -> SigningKey:
    """Raises StatementError for a file that others may read, or that holds no Ed25519 key in PKCS8 PEM.

    Of a program's file the command is read, and nothing is started.
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
            hint="create one: imagefactory keys new NAME",
        ) from error
    if not isinstance(private, Ed25519PrivateKey):
        raise StatementError(
            "private-key-invalid",
            f"{path} is not an Ed25519 key",
            hint="create one: imagefactory keys new NAME",
        )
    raw = private.public_key().public_bytes(Encoding.Raw, PublicFormat.Raw)
    return SigningKey(name=path.stem, public=raw, sign=private.sign)


def _read_program(path: Path) -> SigningKey:
    command = parse_command(_read_private(path, program=True), path)
    raw = read_public(path.stem, path.parent).raw
    return SigningKey(name=path.stem, public=raw, sign=signing_program(path.stem, command, raw).sign)


def _read_private(path: Path, *, program: bool = False) -> bytes:
    """Raises StatementError for a file that others may read; for a program's also if it is another user's."""
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
            "private-key-invalid", f"{path} is not a regular file", hint="set the file of a key"
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
                hint="create your own: imagefactory keys new NAME --command ... --public ...",
            )
        return file.read(LARGEST_FILE)


# --- public keys ---------------------------------------------------------------------------------


def format_public(raw: bytes) -> bytes:
    """PEM, as every tool reads it."""
    text = base64.b64encode(_DER + raw).decode("ascii")
    return f"-----BEGIN PUBLIC KEY-----\n{text}\n-----END PUBLIC KEY-----\n".encode("ascii")


def parse_public(data: bytes, name: str) -> PublicKey:
    """A public key in PEM, as ssh writes it (`ssh-ed25519 AAAA...`), or as base64 of its 32 bytes.

    Raises UsageError for anything else.
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
            f"{name}: not a public Ed25519 key{private}",
            hint="use the .pub file that imagefactory keys new wrote",
        )
    y = int.from_bytes(raw, "little") & ~(1 << 255)
    if y >= _FIELD or y in _SMALL:
        raise UsageError(
            "public-key-weak",
            f"{name}: a key that accepts forged signatures",
            hint="do not trust it, nor its owner",
        )
    return PublicKey(name=name, raw=raw)


def read_public(text: str, folder: Path) -> PublicKey:
    """The public key of a file, or of a name in the folder of keys. Raises UsageError."""
    known = folder / f"{text}.pub"
    path = known if NAME.fullmatch(text) and known.is_file() else Path(text)
    try:
        with path.open("rb") as file:
            data = file.read(LARGEST_FILE)
    except OSError as error:
        raise UsageError(
            "key-not-found",
            f"'{text}' is neither a file nor a key in {folder}",
            hint="list the keys: imagefactory keys show",
        ) from error
    return parse_public(data, path.stem)


def own_keys(folder: Path) -> tuple[PublicKey, ...]:
    """The keys that sign here, by name; of one without its .pub nothing can be told, so it is left out."""
    return tuple(
        parse_public(path.read_bytes()[:LARGEST_FILE], path.stem)
        for path in sorted(folder.glob("*.pub"))
        if any(path.with_suffix(suffix).exists() for suffix in (FILE, PROGRAM))
    )
