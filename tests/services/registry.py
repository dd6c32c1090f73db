"""Debian's docker-registry on a free port of 127.0.0.1, with the ways in that tests ask for."""

from __future__ import annotations

import ctypes
import json
import re
import ssl
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.services.authority import Certificate
from tests.services.processes import Job, Program, ServiceError, find, log_of, running
from tests.services.tokens import TokenServer, token_server

SERVICE = "imagefactory tests"
ISSUER = "imagefactory tests' tokens"


@dataclass(frozen=True, slots=True, kw_only=True)
class RegistryOptions:
    """`users` are names to passwords. The registry asks for them, or with `tokens` a token server does."""

    users: Mapping[str, str] = field(default_factory=dict)
    tokens: bool = False
    token_seconds: int = 300
    deletes: bool = True
    size: int | None = None
    """Bytes that its storage can hold; without it, what the disk has."""
    storage: Path | None = None
    """Kept when the registry ends, to start another on it; without it, a folder that is removed."""
    port: int = 0
    """0 takes a free one."""
    certificate: Certificate | None = None
    """With it the registry speaks TLS, and is called by the certificate's name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RegistryServer:
    host: str
    """`127.0.0.1:port`, or `name:port` with TLS, as it stands in an image's name."""
    storage: Path
    log: Path
    tokens: TokenServer | None
    secure: bool = False

    @property
    def address(self) -> str:
        return f"{'https' if self.secure else 'http'}://{self.host}"

    @property
    def port(self) -> int:
        return int(self.host.rpartition(":")[2])


def bcrypt(password: str) -> str:
    """As the registry demands of an htpasswd file; by the C library, as Python's own module goes away."""
    crypt = ctypes.CDLL("libcrypt.so.1").crypt
    crypt.restype = ctypes.c_char_p
    found: bytes = crypt(password.encode(), b"$2b$05$abcdefghijklmnopqrstuu")
    return found.decode()


def _answers(where: str, certificate: Certificate | None) -> bool:
    scheme = "https" if certificate else "http"
    context = ssl.create_default_context(cafile=certificate.authority) if certificate else None
    try:
        with urllib.request.urlopen(f"{scheme}://{where}/v2/", timeout=5, context=context):
            return True
    except urllib.error.HTTPError as error:
        return error.code == 401
    except OSError:
        return False


@contextmanager
def registry_server(folder: Path, options: RegistryOptions | None = None) -> Iterator[RegistryServer]:
    """A registry whose configuration and log lie in `folder`. Raises ServiceError when it does not start."""
    options = options or RegistryOptions()
    binary = find("docker-registry")
    folder.mkdir(parents=True, exist_ok=True)
    storage = options.storage or folder / "storage"
    storage.mkdir(parents=True, exist_ok=True)
    log = log_of(folder, binary)
    log.unlink(missing_ok=True)
    config: dict[str, Any] = {
        "version": "0.1",
        "log": {"level": "info", "accesslog": {"disabled": True}},
        "storage": {
            "filesystem": {"rootdirectory": str(storage)},
            "delete": {"enabled": options.deletes},
        },
        "http": {"addr": f"127.0.0.1:{options.port}"},
    }
    certificate = options.certificate
    if certificate:
        config["http"]["tls"] = {"certificate": str(certificate.path), "key": str(certificate.key)}
    with ExitStack() as stack:
        tokens = None
        if options.tokens:
            tokens = stack.enter_context(token_server(folder, options.users, SERVICE, ISSUER))
            tokens.seconds = options.token_seconds
            config["auth"] = {
                "token": {
                    "realm": tokens.realm,
                    "service": SERVICE,
                    "issuer": ISSUER,
                    "rootcertbundle": str(tokens.certificate),
                }
            }
        elif options.users:
            passwords = folder / "htpasswd"
            passwords.write_text("".join(f"{name}:{bcrypt(word)}\n" for name, word in options.users.items()))
            config["auth"] = {"htpasswd": {"realm": SERVICE, "path": str(passwords)}}
        start: tuple[str, ...] = (binary, "serve", str(folder / "registry.json"))
        if options.size is not None:
            mount = f'mount -t tmpfs -o size={options.size} tmpfs "$1" && shift && exec "$@"'
            start = ("/bin/sh", "-c", mount, "sh", str(storage), *start)
            log = log_of(folder, "/bin/sh")
        (folder / "registry.json").write_text(json.dumps(config))  # JSON is YAML

        def host() -> str | None:
            text = log.read_text(errors="replace") if log.exists() else ""
            found = re.search(r"listening on (127\.0\.0\.1:[0-9]+)", text)
            return found[1] if found else None

        def ready() -> bool:
            where = host()
            return where is not None and _answers(where, certificate)

        mine = () if options.storage else (storage,)
        job = Job(folder=folder, programs=(Program(argv=start),), ready=ready, remove=mine)
        stack.enter_context(running(job))
        where = host()
        if where is None:
            raise ServiceError(f"{log} does not say where the registry listens")
        if certificate:
            where = where.replace("127.0.0.1", certificate.name)
        yield RegistryServer(
            host=where, storage=storage, log=log, tokens=tokens, secure=certificate is not None
        )
