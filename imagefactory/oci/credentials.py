"""Credentials for registries, read from the files of docker and podman. imagefactory stores none.

docker's config.json (`auths`, `credHelpers`, `credsStore`) and podman's auth.json. A helper is a program
`docker-credential-NAME`, queried over its stdin (docker/docker-credential-helpers, README). No credential is
ever on a command line, in a message, a log or a repr.
"""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from imagefactory.errors import RegistryError, os_reason

HELPER_SECONDS = 30.0
_DOCKER_HUB = ("docker.io", "index.docker.io", "registry-1.docker.io")
_DOCKER_HUB_KEY = "https://index.docker.io/v1/"  # written by `docker login` since docker 0.x
_TOKEN_USER = "<token>"  # noqa: S105  # a helper's user name for an identity token


@dataclass(frozen=True, slots=True, kw_only=True)
class Credential:
    """A user with a password, or an identity token with an empty `user`. `origin` is its file or helper."""

    user: str
    secret: str = field(repr=False)
    origin: str = ""

    @property
    def basic(self) -> str:
        """Return the value of an Authorization header."""
        return "Basic " + base64.b64encode(f"{self.user}:{self.secret}".encode()).decode()


Credentials = Callable[[str], Credential | None]
"""A lookup from a host to the credential stored by `docker login HOST`; None is anonymous."""


def anonymous(host: str) -> Credential | None:  # noqa: ARG001
    return None


def find_credentials(environ: Mapping[str, str]) -> Credentials:
    """Return a lookup in REGISTRY_AUTH_FILE, docker's config.json, podman's auth.json, in this order.

    Raises RegistryError, when a host is looked up, for a file that cannot be read and a helper that is
    missing or fails.
    """
    files = credential_files(environ)

    def find(host: str) -> Credential | None:
        for path in files:
            credential = _find_credential(path, host, environ)
            if credential is not None:
                return credential
        return None

    return find


def credential_files(environ: Mapping[str, str]) -> tuple[Path, ...]:
    """Return the credential files; REGISTRY_AUTH_FILE replaces podman's own.

    Source: docker login(1), containers-auth.json(5).
    """
    named, docker = environ.get("REGISTRY_AUTH_FILE", ""), environ.get("DOCKER_CONFIG", "")
    home, runtime = environ.get("HOME", ""), environ.get("XDG_RUNTIME_DIR", "")
    files = [Path(named)] if named else []
    if docker or home:
        files.append((Path(docker) if docker else Path(home) / ".docker") / "config.json")
    if runtime and not named:
        files.append(Path(runtime) / "containers/auth.json")
    return tuple(files)


def _find_credential(path: Path, host: str, environ: Mapping[str, str]) -> Credential | None:
    try:
        data = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        # The parser's own message quotes its input, which may be a secret.
        reason = os_reason(error) if isinstance(error, OSError) else "it is not JSON"
        raise RegistryError(
            "credentials-invalid",
            f"cannot read the credentials in {path}: {reason}",
            hint=f"fix or delete {path}",
        ) from None
    if not isinstance(data, dict):
        raise RegistryError(
            "credentials-invalid", f"{path} is not a Docker configuration file", hint=f"fix or delete {path}"
        )
    names = _names(host)
    helpers = _mapping(data.get("credHelpers"))
    for name in names:
        if isinstance(helpers.get(name), str):
            return query_helper(helpers[name], name, environ)
    store = data.get("credsStore")
    if isinstance(store, str) and store:
        for name in names:
            credential = query_helper(store, name, environ)
            if credential is not None:
                return credential
    auths = {_key(name): entry for name, entry in _mapping(data.get("auths")).items()}
    for name in names:
        credential = parse_auth(_mapping(auths.get(_key(name))), origin=str(path))
        if credential is not None:
            return credential
    return None


def _names(host: str) -> tuple[str, ...]:
    return (_DOCKER_HUB_KEY, *_DOCKER_HUB) if host in _DOCKER_HUB else (host, f"https://{host}")


def _key(name: str) -> str:
    """Return a host's key: `HOST` for docker's `https://HOST/v1/`; podman's `HOST/path` stays."""
    scheme, _, rest = name.rpartition("://")
    return rest.partition("/")[0] if scheme else name


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def parse_auth(entry: Mapping[str, Any], *, origin: str) -> Credential | None:
    """Parse one entry of `auths`; None for the empty entry of a helper."""
    token = entry.get("identitytoken")
    if isinstance(token, str) and token:
        return Credential(user="", secret=token, origin=origin)
    user, secret = str(entry.get("username") or ""), str(entry.get("password") or "")
    if entry.get("auth"):
        try:
            user, colon, secret = base64.b64decode(str(entry["auth"]), validate=True).decode().partition(":")
        except ValueError:  # binascii's and Unicode's errors are ValueErrors
            colon = ""
        if not colon:
            raise RegistryError(
                "credentials-invalid",
                f"an `auth` in {origin} is not base64 of user:password",
                hint="log in again: docker login HOST",
            )
        secret = secret.rstrip("\0")
    return Credential(user=user, secret=secret, origin=origin) if user and secret else None


def query_helper(name: str, host: str, environ: Mapping[str, str]) -> Credential | None:
    """Return the answer of `docker-credential-NAME get` for `host`, or None.

    Raises RegistryError for a helper that is not installed, fails or takes more than 30 seconds.
    """
    program = f"docker-credential-{name}"
    path = shutil.which(program, path=environ.get("PATH")) if "/" not in name else None
    if path is None:
        raise RegistryError(
            "credential-helper-missing",
            f"the credential helper {program} in Docker's settings is not installed",
            hint=f"install {program}, or remove it from Docker's config.json and log in again",
        )
    try:
        process = subprocess.run(
            [path, "get"],
            input=host.encode(),
            capture_output=True,
            timeout=HELPER_SECONDS,
            env=dict(environ),
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise RegistryError(
            "credential-helper-failed",
            f"{program} did not answer in {HELPER_SECONDS:.0f} seconds",
            hint=f"check that it does not wait for a password: echo {host} | {program} get",
        ) from None
    except OSError as error:
        raise RegistryError(
            "credential-helper-failed",
            f"cannot run {program}: {os_reason(error)}",
            hint=f"check the permissions of {path}",
        ) from error
    if process.returncode:
        # Helpers print this sentence on stdout if they have no credential; docker itself checks for it.
        if b"credentials not found" in process.stdout:
            return None
        raise RegistryError(
            "credential-helper-failed",
            f"{program} failed for {host} (exit code {process.returncode})",
            hint=f"to see the reason, run echo {host} | {program} get",
        )
    try:
        answer = json.loads(process.stdout)
        user, secret = str(answer["Username"]), str(answer["Secret"])
    except (ValueError, KeyError, TypeError):
        raise RegistryError(
            "credential-helper-failed",
            f"the answer of {program} is not a credential",
            hint=f"update {program}",
        ) from None
    if not secret:
        return None
    return Credential(user="" if user == _TOKEN_USER else user, secret=secret, origin=program)
