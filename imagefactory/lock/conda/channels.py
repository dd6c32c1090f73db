"""Conda channels: their addresses for this machine, credentials and certificates.

A channel's true address is part of the identity of its packages and is in locks. The setting `channels` sets
another address to read it from. Credentials come from the files of conda's own programs:
`$RATTLER_AUTH_FILE` or `~/.rattler/credentials.json`, then netrc. Their keys are hosts, without a port.
"""

from __future__ import annotations

import json
import netrc
import os
import re
import tempfile
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlsplit

from imagefactory.errors import LockError, ToolError, UnreachableError, UsageError, extra_hint, redact
from imagefactory.http import Login, on_loopback, sends_openly, without_login
from imagefactory.recipes.values import channel_address

if TYPE_CHECKING:  # only needed for solving
    from rattler import Gateway


Credential = Mapping[str, Any]
"""The format of rattler's programs: {"BearerToken": t}, {"CondaToken": t} or {"BasicHTTP": {"username": u,
"password": p}}."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ContainerChannels:
    """The channels for a build in a container.

    `text` is JSON, `{"mirrors": {prefix of true addresses: address}, "auth": {host: Credential}}`.
    `loopback` is true if an address is on this machine's loopback. `hidden` are secret words.
    """

    text: str = field(repr=False)
    hidden: tuple[str, ...] = field(repr=False)
    loopback: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ChannelAccess:
    """This machine's access to channels, a WebAccess for HttpSession.

    `mirrors` pairs prefixes of true addresses with an address or a `file:` URL to read, both without a slash
    at the end. `credentials` are by host (`*.example.org` for all its subdomains). `certificates` is a file
    or directory of CA certificates, empty for those of the libraries.
    """

    mirrors: tuple[tuple[str, str], ...] = ()
    credentials: tuple[tuple[str, Credential], ...] = field(default=(), repr=False)
    certificates: str = ""
    proxy: str = ""
    retries: int = 3

    def place(self, url: str) -> str:
        """Return the address to read the channel or package of a true address. The longest prefix decides."""
        true, location = self._mirror(url)
        return location + url.removeprefix(true)

    def _mirror(self, url: str) -> tuple[str, str]:
        """Return the pair of `mirrors` for an address, two empty texts for none."""
        fitting = [pair for pair in self.mirrors if url == pair[0] or url.startswith(f"{pair[0]}/")]
        return max(fitting, key=lambda pair: len(pair[0]), default=("", ""))

    def _placed(self, channels: Iterable[str]) -> list[tuple[str, str]]:
        """Return (address to read, true address) of channels, the longest first."""
        return sorted(((self.place(true), true) for true in channels), key=lambda pair: -len(pair[0]))

    def address(self, url: str) -> str:
        """Return the address to read with conda's token in it: for requests, not for messages."""
        placed = self.place(url)
        parts = urlsplit(placed)
        token = self._credential(parts.hostname or "").get("CondaToken")
        if not token or parts.scheme == "file" or sends_openly(placed, self._places()):
            return placed
        return parts._replace(path=f"/t/{quote(token, safe='')}{parts.path}").geturl()

    def true_address(self, url: str, channels: Iterable[str]) -> str:
        """Return the true address of the `url` of a record in one of `channels` (true addresses)."""
        for location, true in self._placed(channels):
            if url == location or url.startswith(f"{location}/"):
                return true + url.removeprefix(location)
        return url

    def login(self, url: str) -> Login:
        """Return the login of a request. Only a netrc that was passed is read."""
        if sends_openly(url, self._places()):
            return without_login
        credential = self._credential(urlsplit(url).hostname or "")
        if basic := credential.get("BasicHTTP"):
            return basic["username"], basic["password"]
        bearer = credential.get("BearerToken")

        def sign(request: Any) -> Any:
            if bearer:
                request.headers["Authorization"] = f"Bearer {bearer}"
            return request

        return sign

    def gateway(self, cache: Path) -> Gateway:
        """Return the reader of the channels' records, which are cached below `cache`.

        Raises ToolError without py-rattler, LockError if rattler finds no CA certificates.
        """
        rattler = _rattler()
        from rattler.networking import Client

        logins = {host: dict(credential) for host, credential in self.credentials}
        with tempfile.TemporaryDirectory(prefix="imagefactory-channels-") as directory:
            # rattler uses this file instead of its own search for credentials.
            file = Path(directory) / "credentials.json"
            file.touch(mode=0o600)
            file.write_text(json.dumps(logins))
            lines = [f"authentication-override-file = {json.dumps(str(file))}"]
            if self.certificates:
                lines.append('tls-root-certs = "system"')
            config = rattler.Config.from_toml("\n".join(lines))
            try:
                with _trusting(self.certificates):
                    client = Client.from_config(
                        config, max_retries=self.retries, user_agent="imagefactory", timeout=300
                    )
            except ValueError as error:
                raise LockError(
                    "channel-certificates-missing",
                    f"cannot query channels, probably because CA certificates are missing: {error}",
                    hint="install ca-certificates, or set `certificates` to your site's CA bundle "
                    "(imagefactory config)",
                ) from error
        folder_of_records = cache / "repodata"
        folder_of_records.mkdir(parents=True, exist_ok=True)
        gateway: Gateway = rattler.Gateway(cache_dir=folder_of_records, client=client)
        return gateway

    def fault(self, text: str, channels: Sequence[str]) -> LockError:
        """Return the error for rattler's message about reading `channels`."""
        placed = self._placed(channels)
        only = placed[0] if len(placed) == 1 else ("", "")
        location, true = next((pair for pair in placed if pair[0] in text), only)
        name = f"the channel {true}" if true else f"one of the channels {', '.join(channels)}"
        if location != true:
            name += f" (at {location})"
        hosts = urlsplit(location).hostname or "its host"
        status = re.search(r"HTTP status \w+ error \((\d{3})", text)
        code = int(status[1]) if status else 0
        if code in (401, 403):
            return LockError(
                "channel-access-denied",
                f"{name} denies access: its server answered {code}",
                hint=f"write a user and password for {hosts} in ~/.netrc, "
                "or a token in ~/.rattler/credentials.json",
            )
        if "could not find subdir" in text:
            if location.startswith("file:"):
                return LockError(
                    "channel-not-indexed",
                    f"{name} has no noarch/repodata.json",
                    hint="index the directory (conda index, rattler-index fs), or fix the setting 'channels'",
                )
            return LockError(
                "channel-not-found",
                f"{name} does not exist: its server answered {code or 404} for its noarch records",
                hint="fix the name in `channels` of the recipe, or its address in the setting 'channels'",
            )
        reason = _reason(text)
        if "certificate" in text:
            return LockError(
                "channel-certificate-untrusted",
                f"{name} has a certificate that is not trusted: {reason}",
                hint="set `certificates` to your site's CA bundle (imagefactory config)",
            )
        return UnreachableError(
            "channel-unreachable",
            f"cannot read {name}: {reason}",
            hint="run the same command again later, or set a mirror in the setting 'channels'",
        )

    def site(self, urls: Sequence[str]) -> ContainerChannels:
        """Return the data for a container to fetch `urls` (true addresses) as this machine does.

        Raises UsageError for a channel in a local directory, which containers cannot read.
        """
        mirrors: dict[str, str] = {}
        hosts: set[str] = set()
        for url in urls:
            true, location = self._mirror(url)
            if true:
                mirrors[true] = location
            placed = urlsplit(self.place(url))
            if placed.scheme == "file":
                directory, _, name = placed.path.rpartition("/")
                raise UsageError(
                    "channel-not-in-container",
                    f"{name} is in a local directory ({directory}), which containers cannot read",
                    hint="build with `--engine assemble`, or serve the directory: "
                    "`python3 -m http.server --bind 127.0.0.1`",
                )
            hosts.add(placed.hostname or "")
        logins = {host: dict(self._credential(host)) for host in sorted(hosts) if self._credential(host)}
        return ContainerChannels(
            text=json.dumps({"mirrors": mirrors, "auth": logins}, sort_keys=True) + "\n",
            hidden=tuple(sorted({word for login in logins.values() for word in _command_words(login)})),
            loopback=any(map(on_loopback, hosts)),
        )

    def _places(self) -> tuple[str, ...]:
        """Return the addresses that the user set, which may be without TLS."""
        return tuple(location for _, location in self.mirrors)

    def _credential(self, host: str) -> Credential:
        """Return the credential of a host, else that of the nearest parent domain."""
        known = dict(self.credentials)
        while host:
            if host in known:
                return known[host]
            host = host.removeprefix("*.").partition(".")[2]
            host = f"*.{host}" if host else ""
        return {}


def find_channels(setting: str, environ: Mapping[str, str], certificates: str) -> ChannelAccess:
    """Return this machine's access to channels.

    `setting` is the setting `channels` (`conda-forge=https://mirror/conda-forge,...`; directories are
    absolute), `certificates` a file or directory. Raises UsageError for an unreadable credentials file.
    """
    pairs = (item.strip().partition("=") for item in setting.split(",") if item.strip())
    mirrors = tuple((channel_address(true), _place(location)) for true, _, location in pairs)
    credentials = {**_netrc(environ), **_credentials_file(environ)}
    return ChannelAccess(
        mirrors=mirrors, credentials=tuple(sorted(credentials.items())), certificates=certificates
    )


def _place(text: str) -> str:
    return text.rstrip("/") if "://" in text else Path(text).as_uri()


def _netrc(environ: Mapping[str, str]) -> dict[str, Credential]:
    path = Path(environ.get("NETRC") or Path(environ.get("HOME") or "/") / ".netrc")
    try:
        hosts = netrc.netrc(path).hosts if path.is_file() else {}
    except (OSError, UnicodeDecodeError, netrc.NetrcParseError) as error:
        # Not the error's own text: it quotes the line.
        raise UsageError(
            "channel-credentials-invalid", f"cannot read {path}: {type(error).__name__}", hint=f"fix {path}"
        ) from None
    return {
        host: {"BasicHTTP": {"username": login, "password": password or ""}}
        for host, (login, _, password) in hosts.items()
        if host != "default" and (login or password)
    }


def _credentials_file(environ: Mapping[str, str]) -> dict[str, Credential]:
    home = Path(environ.get("HOME") or "/")
    path = Path(environ.get("RATTLER_AUTH_FILE") or home / ".rattler/credentials.json")
    if not path.is_file():
        return {}
    hint = f"fix {path}; `pixi auth login` and `rattler auth login` write such a file"
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(
            "channel-credentials-invalid", f"cannot read {path}: {type(error).__name__}", hint=hint
        ) from None
    credentials: dict[str, Credential] = {}
    for host, entry in data.items() if isinstance(data, dict) else [("", None)]:
        if not isinstance(entry, dict) or len(entry) != 1:
            raise UsageError(
                "channel-credentials-invalid", f"{path}: the entry of '{host}' is not a credential", hint=hint
            )
        if _is_credential(entry):  # others (S3 keys, OAuth) are for hosts that are not queried here
            credentials[host] = entry
    return credentials


def _is_credential(entry: Credential) -> bool:
    basic = entry.get("BasicHTTP")
    if isinstance(basic, dict):
        return all(isinstance(basic.get(key), str) for key in ("username", "password"))
    return any(isinstance(entry.get(key), str) for key in ("BearerToken", "CondaToken"))


def _command_words(credential: Credential) -> set[str]:
    basic = credential.get("BasicHTTP")
    secrets = [basic["password"]] if basic else list(credential.values())
    return {word for secret in secrets for word in (secret, quote(secret, safe="")) if word}


def _reason(text: str) -> str:
    """Return the innermost reason of rattler's nested message, without addresses."""
    lines = [redact(line.removeprefix("Caused by: ")).strip() for line in text.splitlines() if line.strip()]
    first, last = (lines[0], lines[-1]) if lines else ("", "no reason was given")
    last = re.sub(r" for url \(\S+\)", "", last)
    tried = re.match(r"Request failed after (\d+) retries", first)
    return f"{last} ({int(tried[1]) + 1} times in a row)" if tried else last


def _rattler() -> Any:
    try:
        import rattler
    except ImportError as error:
        raise ToolError(
            "extra-not-installed", "py-rattler is not installed", hint=extra_hint("conda")
        ) from error
    return rattler


_ENVIRONMENT = threading.Lock()


@contextmanager
def _trusting(certificates: str) -> Iterator[None]:
    """Set the CA certificates in the environment, where rattler reads them when it creates a client."""
    if not certificates:
        yield
        return
    names = ("SSL_CERT_FILE", "SSL_CERT_DIR")
    with _ENVIRONMENT:
        before = {name: os.environ.pop(name) for name in names if name in os.environ}
        os.environ[names[Path(certificates).is_dir()]] = certificates
        try:
            yield
        finally:
            for name in names:
                os.environ.pop(name, None)
            os.environ.update(before)
