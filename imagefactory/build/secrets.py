"""This machine's settings for a build: its package index, proxy, certificates and channels.

They are passed as secrets (docker) or a mounted directory (apptainer), with the names in build/steps.py, and
are in no layer. The index's address may have a password. It is only in `pip_conf`, and channels' credentials
are only in `channels`. `hide` removes passwords from all output of a build.
"""

from __future__ import annotations

import json
import netrc
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from urllib.parse import quote, unquote, urlsplit

from imagefactory.access import Access, conda_channels, package_index
from imagefactory.build.steps import CERTIFICATES, CHANNELS, PIP_CONF
from imagefactory.errors import UsageError, os_problem, redact
from imagefactory.http import local_path, on_loopback
from imagefactory.lock.conda.channels import ContainerChannels
from imagefactory.lock.pypi.index import PackageIndex
from imagefactory.lock.pypi.requirements import from_indexes
from imagefactory.model import Lock

DEBIAN_BUNDLE = Path("/etc/ssl/certs/ca-certificates.crt")
LARGEST_SECRET = 500 * 1024
"""BuildKit's limit for a secret in bytes (its MaxSecretSize)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildSecrets:
    """Secrets of a build. `pip_conf` is the text of a pip.conf, `certificates` a PEM bundle or None.

    With None the base's certificates are used. `channels` is the text of channels.json, empty without
    channels. `loopback` is true if the index, its proxy or a channel is on this machine's loopback, which a
    build reaches only in this machine's own network. `hidden` are secret words.
    """

    pip_conf: str = field(repr=False)
    certificates: bytes | None = field(repr=False)
    loopback: bool
    hidden: tuple[str, ...] = field(repr=False)
    channels: str = field(default="", repr=False)

    def hide(self, text: str) -> str:
        """Return `text` without passwords, for a log, an error or a terminal."""
        for word in self.hidden:
            text = text.replace(word, "****")
        return redact(text)

    def write(self, directory: Path) -> None:
        """Write the files into `directory`, readable only by this user."""
        files = {
            PIP_CONF: self.pip_conf.encode(),
            CERTIFICATES: self.certificates,
            CHANNELS: self.channels.encode() or None,
        }
        for name, data in files.items():
            if data is not None:
                path = directory / name
                path.touch(mode=0o600)
                path.write_bytes(data)


AskSecrets = Callable[[Lock | None], BuildSecrets]
"""A function that returns the secrets of a build of this lock; for None, those of every build."""


def build_secrets_of(access: Access, lock: Lock | None) -> BuildSecrets:
    """Return the secrets for a build of `lock` in a container."""
    channels = lock.channels if lock else ()
    site = conda_channels(access).site(channels) if channels else None
    index = package_index(access)
    named = from_indexes(lock.origins) if lock else {}
    addresses = (
        {name: index.address(name, f"{lock.target}: {package}") for package, name in named.items()}
        if lock
        else {}
    )
    return find_secrets(replace(index, named=tuple(addresses.items())), access.environ, site)


def find_secrets(
    index: PackageIndex, environ: Mapping[str, str], channels: ContainerChannels | None = None
) -> BuildSecrets:
    """Return the secrets for a build to reach `index`, its named indexes and `channels`.

    The certificates are those of `index`. If it has none or a directory, Debian's bundle is used if it
    exists. Raises UsageError for an index or a channel that containers cannot reach, for unreadable
    certificates, and for a larger bundle than a build accepts.
    """
    for address, origin in ((index.url, index.origin), *((url, f"'{name}'") for name, url in index.named)):
        if local_path(address):
            raise UsageError(
                "index-is-directory",
                f"the package index {address} ({origin}) is a directory, which a container cannot read",
                hint="build with `--engine assemble`, or serve it: `python3 -m http.server --bind 127.0.0.1`",
            )
    (url, hidden), *others = (
        _with_login(address, environ) for address in (index.url, *dict(index.named).values())
    )
    more = tuple(address for address, _ in others)
    proxy = _proxy(index, url)
    trusted = dict.fromkeys(host for address in (url, *more) for host in _trusted(index, address))
    settings = {
        "index-url": url,
        "extra-index-url": " ".join(more),  # pip uses the one with a file of that hash
        "proxy": proxy,
        "trusted-host": " ".join(trusted),
    }
    lines = ["[global]", *(f"{name} = {value}" for name, value in settings.items() if value)]
    if not all(line.isprintable() for line in lines):
        raise UsageError(
            "index-invalid",
            f"the package index ({index.origin}) or its proxy has a control character",
            hint="remove the character from its address",
        )
    proxies = _proxies(environ) if channels else {}
    addresses = (url, proxy, *more, *(value for name, value in proxies.items() if name != "no_proxy"))
    hosts = {urlsplit(address).hostname or "" for address in addresses if address}
    words = {word for address in addresses[1:] for word in _passwords(address)}
    words |= {*hidden, *(channels.hidden if channels else ())}
    return BuildSecrets(
        pip_conf="\n".join([*lines, ""]),
        certificates=_certificates(index.certificates),
        loopback=any(map(on_loopback, hosts)) or (channels is not None and channels.loopback),
        hidden=tuple(sorted(words, key=len, reverse=True)),
        channels=json.dumps({**json.loads(channels.text), "proxies": proxies}) if channels else "",
    )


def _proxies(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the proxy variables in lower case, which all programs read."""
    names = ("http_proxy", "https_proxy", "all_proxy", "no_proxy")
    return {name: value for name in names if (value := environ.get(name) or environ.get(name.upper()))}


_HINTS = {
    "hash": "the channel, or its mirror, has another file than the locked one: fix that, or lock again",
    "fetch": "can a container reach the channel? The setting `channels` may name a mirror",
    "script": "constrain the package to a version without such a script",
}


def linker_failure(text: str) -> tuple[str, str] | None:
    """Return the error of conda_install.py in a build's output, and its fix; None without an error.

    Its one line of JSON may be truncated, because logs cut long lines.
    """
    match = re.search(r'\{"error": "([a-z]+)", "message": "((?:[^"\\]|\\u[0-9a-f]{4}|\\[^u])*)', text)
    if not match:
        return None
    return json.loads(f'"{match[2]}"'), _HINTS.get(match[1], "see what the error says")


def _with_login(url: str, environ: Mapping[str, str]) -> tuple[str, tuple[str, ...]]:
    """Return `url` with the user and password of this machine's netrc, and the words to hide."""
    parts = urlsplit(url)
    if not url or parts.username is not None:
        return url, _passwords(url)
    path = Path(environ.get("NETRC") or Path(environ.get("HOME") or "/") / ".netrc")
    try:
        login = netrc.netrc(path).authenticators(parts.hostname or "") if path.is_file() else None
    except (OSError, netrc.NetrcParseError) as error:
        # Not the error's own text: it quotes the line.
        raise UsageError(
            "netrc-invalid", f"cannot read {path}: {type(error).__name__}", hint=f"fix {path}"
        ) from None
    if not login:
        return url, ()
    user, password = quote(login[0], safe=""), quote(login[2] or "", safe="")
    address = parts._replace(netloc=f"{user}:{password}@{parts.netloc}").geturl()
    return address, _passwords(address)


def _passwords(url: str) -> tuple[str, ...]:
    """Return the password of `url`, as written and decoded. A user without a password is often a token."""
    parts = urlsplit(url)
    secret = parts.password or (parts.username if parts.password is None else "") or ""
    return tuple({secret, unquote(secret)} - {""})


def _proxy(index: PackageIndex, url: str) -> str:
    variables = {name.lower(): value for name, value in index.environment if value}
    scheme = urlsplit(url).scheme or "https"
    proxy = index.proxy or variables.get(f"{scheme}_proxy") or variables.get("all_proxy") or ""
    host = urlsplit(url).hostname or ""
    # pip uses its `proxy` for every host, so exceptions are decided here.
    around = [name.strip().lstrip(".") for name in variables.get("no_proxy", "").split(",")]
    direct = any(name == "*" or (name and f".{host}".endswith(f".{name}")) for name in around)
    return "" if direct or on_loopback(host) else proxy


def _trusted(index: PackageIndex, url: str) -> tuple[str, ...]:
    """Return hosts without a valid certificate: those in uv's settings, and an index with plain HTTP.

    Their files are still checked against the lock's hashes.
    """
    parts = urlsplit(url)
    named = dict(index.environment).get("UV_INSECURE_HOST", "").replace(",", " ").split()
    plain = [parts.netloc.rpartition("@")[2]] if parts.scheme == "http" else []
    return tuple(dict.fromkeys([*plain, *named]))


def _certificates(named: str) -> bytes | None:
    path = Path(named) if named and Path(named).is_file() else DEBIAN_BUNDLE
    if not path.is_file():
        return None
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UsageError(*os_problem("read", path, error), hint="check its permissions") from error
    if len(data) > LARGEST_SECRET:
        raise UsageError(
            "certificates-too-large",
            f"the certificates {path} are {len(data):,} bytes, more than the limit ({LARGEST_SECRET:,})",
            hint="set SSL_CERT_FILE to a file with fewer certificates (the setting `certificates` is added)",
        )
    return data
