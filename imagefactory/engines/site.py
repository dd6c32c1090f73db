"""What the machine that builds tells pip inside a build: its package index, its proxy, its certificates.

They reach a build as secrets (docker) or a bound folder (apptainer), under the names that
render/steps.py gives them, and stay in no layer. The index's address may hold a password: it stands in
`pip_conf` and nowhere else, and `hide` takes it out of whatever a build prints.
"""

from __future__ import annotations

import netrc
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import quote, unquote, urlsplit

from imagefactory.errors import UsageError
from imagefactory.lock.index import PackageIndex, local_path, redact
from imagefactory.render.steps import SITE_FILES

DEBIAN_BUNDLE = Path("/etc/ssl/certs/ca-certificates.crt")
LARGEST_SECRET = 500 * 1024
"""Bytes that BuildKit lets a secret have (its MaxSecretSize)."""
LOOPBACK = ("localhost", "127.0.0.1", "::1")


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildSecrets:
    """`pip_conf` is the text of a pip.conf, `certificates` a PEM bundle or None (the base's own hold).

    `loopback` is true where the index or its proxy listens on this machine's loopback, which a build
    reaches only in this machine's own network. `hidden` are the words that nobody may see.
    """

    pip_conf: str = field(repr=False)
    certificates: bytes | None = field(repr=False)
    loopback: bool
    hidden: tuple[str, ...] = field(repr=False)

    def hide(self, text: str) -> str:
        """`text` without passwords, fit for a log, an error or a terminal."""
        for word in self.hidden:
            text = text.replace(word, "****")
        return redact(text)

    def write(self, folder: Path) -> None:
        """Writes what there is into `folder`, readable for this user alone, under the names a build knows."""
        (conf, _), (bundle, _) = SITE_FILES
        for name, data in ((conf, self.pip_conf.encode()), (bundle, self.certificates)):
            if data is not None:
                path = folder / name
                path.touch(mode=0o600)
                path.write_bytes(data)


def find_secrets(index: PackageIndex, environ: Mapping[str, str]) -> BuildSecrets:
    """What a build needs to reach `index` as this machine does.

    `index` decides the certificates too; where it has none or a folder, Debian's bundle is taken if it
    is there. Raises UsageError for an index that no container can reach, for certificates that cannot
    be read, and for more of them than a build takes.
    """
    if local_path(index.url):
        raise UsageError(
            f"the package index {index.url} ({index.origin}) is a folder, which a container does not see",
            hint="build with `--engine assemble`, or serve it: `python3 -m http.server --bind 127.0.0.1`",
        )
    url, hidden = _with_login(index.url, environ)
    proxy = _proxy(index, url)
    lines = ["[global]"]
    if url:
        lines.append(f"index-url = {url}")
    if proxy:
        lines.append(f"proxy = {proxy}")
    trusted = _trusted(index, url)
    if trusted:
        lines.append(f"trusted-host = {' '.join(trusted)}")
    if not all(line.isprintable() for line in lines):
        raise UsageError(f"the package index ({index.origin}) or its proxy holds a control character")
    hosts = {urlsplit(address).hostname or "" for address in (url, proxy) if address}
    return BuildSecrets(
        pip_conf="\n".join([*lines, ""]),
        certificates=_certificates(index.certificates),
        loopback=any(host in LOOPBACK or host.startswith("127.") for host in hosts),
        hidden=tuple(sorted({*hidden, *_passwords(proxy)}, key=len, reverse=True)),
    )


def _with_login(url: str, environ: Mapping[str, str]) -> tuple[str, tuple[str, ...]]:
    """`url` with the user and password that this machine's netrc has for it, and the words to hide."""
    parts = urlsplit(url)
    if not url or parts.username is not None:
        return url, _passwords(url)
    path = Path(environ.get("NETRC") or Path(environ.get("HOME") or "/") / ".netrc")
    try:
        found = netrc.netrc(path).authenticators(parts.hostname or "") if path.is_file() else None
    except (OSError, netrc.NetrcParseError) as error:
        # Not the error's own text: it quotes the line.
        raise UsageError(f"{path} cannot be read: {type(error).__name__}", hint=f"mend {path}") from None
    if not found:
        return url, ()
    user, password = quote(found[0], safe=""), quote(found[2] or "", safe="")
    made = parts._replace(netloc=f"{user}:{password}@{parts.netloc}").geturl()
    return made, _passwords(made)


def _passwords(url: str) -> tuple[str, ...]:
    """The password of `url` as it is written and as it is meant; a user alone is often a token."""
    parts = urlsplit(url)
    secret = parts.password or (parts.username if parts.password is None else "") or ""
    return tuple({secret, unquote(secret)} - {""})


def _proxy(index: PackageIndex, url: str) -> str:
    given = {name.lower(): value for name, value in index.environment if value}
    scheme = urlsplit(url).scheme or "https"
    proxy = index.proxy or given.get(f"{scheme}_proxy") or given.get("all_proxy") or ""
    host = urlsplit(url).hostname or ""
    # pip asks its own `proxy` for every host, so what is to be reached without it is decided here.
    around = [name.strip().lstrip(".") for name in given.get("no_proxy", "").split(",")]
    direct = any(name == "*" or (name and f".{host}".endswith(f".{name}")) for name in around)
    return "" if direct or host in LOOPBACK else proxy


def _trusted(index: PackageIndex, url: str) -> tuple[str, ...]:
    """Hosts without a certificate that holds: those uv was told of, and the index where it is plain HTTP.

    What comes from them is checked against the lock's hashes all the same.
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
        raise UsageError(f"the certificates {path} cannot be read: {error.strerror}") from error
    if len(data) > LARGEST_SECRET:
        raise UsageError(
            f"the certificates {path} are {len(data):,} bytes, more than a build takes ({LARGEST_SECRET:,})",
            hint="set `certificates` to a file with the site's own and the index's alone",
        )
    return data
