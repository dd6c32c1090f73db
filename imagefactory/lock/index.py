"""The package index: which one this machine uses, with which certificates, and HTTP that survives faults.

No index has its address here. It comes from imagefactory.toml, else from uv's own settings, else from
pip's, else it is uv's built-in one. Of pip's settings `index-url`, `cert` and `proxy` are taken over;
`extra-index-url` and `find-links` are not, because they would change what is solved from one machine
to the next. For the same reason uv is given none of its variables that bend a solution.
"""

from __future__ import annotations

import configparser
import html.parser
import json
import random
import re
import ssl
import threading
import tomllib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeAlias, TypeVar
from urllib.parse import unquote, urldefrag, urljoin, urlsplit

from imagefactory.errors import UsageError
from imagefactory.settings import Setting

if TYPE_CHECKING:  # a build with all its wheels in the cache needs no HTTP and does not wait for its import
    import requests
    import tenacity

T = TypeVar("T")
Login: TypeAlias = "tuple[str, str] | Callable[[requests.PreparedRequest], requests.PreparedRequest] | None"
"""A user and password, or what adds them to a request; None for no answer."""

# What uv may see of the caller's environment: where its files are, which index, which certificates,
# how to reach the network. Not here on purpose: UV_EXTRA_INDEX_URL, UV_FIND_LINKS, UV_CONSTRAINT,
# UV_OVERRIDE, UV_RESOLUTION, UV_PRERELEASE, UV_TORCH_BACKEND and their like.
_PASSED_TO_UV = re.compile(
    r"HOME|PATH|TMPDIR|NETRC|XDG_(CONFIG|CACHE|DATA)_HOME|XDG_CONFIG_DIRS"
    r"|(?i:https?_proxy|all_proxy|no_proxy)|SSL_CERT_FILE|SSL_CERT_DIR|SSL_CLIENT_CERT"
    r"|UV_DEFAULT_INDEX|UV_INDEX_URL|UV_INDEX_[A-Z0-9_]+_(USERNAME|PASSWORD)|UV_CONFIG_FILE|UV_NO_CONFIG"
    r"|UV_CACHE_DIR|UV_KEYRING_PROVIDER|UV_INSECURE_HOST|UV_OFFLINE|UV_HTTP_[A-Z_]+|UV_REQUEST_TIMEOUT"
    r"|UV_CONCURRENT_DOWNLOADS|UV_SYSTEM_CERTS|UV_NATIVE_TLS"
)
_USERINFO = re.compile(r"(?<=://)[^\s/]*@")
_TOKEN = re.compile(r"(://[^\s/]+/t/)[^\s/]+")  # as conda writes one into a channel's address
_QUERY = re.compile(r"(/[^\s?#)]*)[?#][^\s)]*")
_TRANSIENT_STATUS = frozenset({408, 425, 429, 500, 502, 503, 504, 522})
_SIMPLE = "application/vnd.pypi.simple.v1+json, application/vnd.pypi.simple.v1+html;q=0.2, text/html;q=0.1"


def redact(text: str) -> str:
    """`text` without the passwords, tokens and queries of the URLs in it, fit for a message or a log."""
    return _TOKEN.sub(r"\1****", _QUERY.sub(r"\1", _USERINFO.sub("", text)))


# --- which index ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class PackageIndex:
    """The index of this machine.

    `url` may hold a user and password; it is empty where uv's built-in index is used. `origin` says
    which setting named it. `certificates` is a file or folder of CA certificates (empty: those of the
    libraries), `proxy` a URL or empty. `environment` is all that uv is started with.
    """

    url: str
    origin: str
    certificates: str
    proxy: str
    environment: tuple[tuple[str, str], ...]

    def login(self, url: str) -> Login:
        """The index's user and password, which go to its own host alone."""
        ours, asked = urlsplit(self.url), urlsplit(url)
        if asked.username is not None or ours.username is None:
            return None  # requests takes a URL's own user, or netrc's
        if (ours.scheme, ours.hostname, ours.port) != (asked.scheme, asked.hostname, asked.port):
            return None
        return unquote(ours.username), unquote(ours.password or "")


def find_index(
    setting: Setting, *, environ: Mapping[str, str], prefix: Path, etc: Path = Path("/etc")
) -> PackageIndex:
    """The index that `setting` (imagefactory.toml), uv's or pip's settings name, in this order.

    `prefix` is `sys.prefix`, where pip keeps the settings of a virtual environment; `etc` holds the
    machine's own. Raises UsageError for a settings file that cannot be read or a certificate file that
    is not there.
    """
    pip = _pip_settings(environ, prefix, etc)
    uv_file = _uv_file_index(environ, etc)
    choices = (
        (setting.value, setting.origin),
        (environ.get("UV_DEFAULT_INDEX", ""), "$UV_DEFAULT_INDEX"),
        (environ.get("UV_INDEX_URL", ""), "$UV_INDEX_URL"),
        uv_file,
        pip.get("index-url", ("", "")),
        ("", "uv's default"),
    )
    url, origin = next(choice for choice in choices if choice[0] or choice is choices[-1])
    certificates = _certificates(environ, pip.get("cert", ("", "")))
    given = {name: value for name, value in environ.items() if _PASSED_TO_UV.fullmatch(name)}
    if setting.value:
        given.pop("UV_INDEX_URL", None)
    if url and (url, origin) != uv_file:  # what stands in uv.toml uv reads itself, credentials and all
        given["UV_DEFAULT_INDEX"] = url
    if certificates and not {"SSL_CERT_FILE", "SSL_CERT_DIR"} & given.keys():
        if Path(certificates).is_dir():
            given |= {"SSL_CERT_DIR": certificates, "UV_SYSTEM_CERTS": "1"}
        else:
            given["SSL_CERT_FILE"] = certificates
    proxy = pip.get("proxy", ("", ""))[0]
    if any(name.lower() in ("http_proxy", "https_proxy", "all_proxy") for name in given):
        proxy = ""
    if proxy:
        given |= {"HTTP_PROXY": proxy, "HTTPS_PROXY": proxy}
    # A solution must not depend on a Python that uv would fetch, nor on the colours of a terminal.
    given |= {"UV_PYTHON_DOWNLOADS": "never", "UV_NO_PROGRESS": "1", "NO_COLOR": "1"}
    return PackageIndex(
        url=url,
        origin=origin,
        certificates=certificates,
        proxy=proxy,
        environment=tuple(sorted(given.items())),
    )


def trusting(index: PackageIndex, bundle: Path | None) -> PackageIndex:
    """`index` with a bundle of CA certificates trusted instead of those it found, by uv as well."""
    if bundle is None:
        return index
    given = {name: value for name, value in index.environment if name != "SSL_CERT_DIR"}
    given["SSL_CERT_FILE"] = str(bundle)
    return replace(index, certificates=str(bundle), environment=tuple(sorted(given.items())))


def _pip_settings(environ: Mapping[str, str], prefix: Path, etc: Path) -> dict[str, tuple[str, str]]:
    """pip's settings, later files and `[install]` first: name -> (value, where it stands).

    Source of the order: pip's documentation, "Configuration files" (global, user, site, PIP_CONFIG_FILE,
    environment; a PIP_CONFIG_FILE that exists replaces the user's, the null device turns all off).
    """
    settings: dict[str, tuple[str, str]] = {}
    for path in _pip_files(environ, prefix, etc):
        parser = configparser.RawConfigParser(strict=False)
        try:
            parser.read_string(path.read_text(encoding="utf-8"), source=str(path))
        except (OSError, UnicodeDecodeError, configparser.Error) as error:
            raise UsageError(f"{path}: pip's settings cannot be read: {error}") from error
        for section in ("global", "install"):
            for name, value in parser.items(section) if parser.has_section(section) else ():
                key = name.lower().replace("_", "-").removeprefix("--")
                settings[key] = (value.strip().strip("\"'"), str(path))
    for key in ("index-url", "cert", "proxy"):
        variable = "PIP_" + key.upper().replace("-", "_")
        if environ.get(variable):
            settings[key] = (environ[variable], f"${variable}")
    return settings


def _pip_files(environ: Mapping[str, str], prefix: Path, etc: Path) -> list[Path]:
    named = environ.get("PIP_CONFIG_FILE", "")
    if named == "/dev/null":
        return []
    folders = [*(folder / "pip" for folder in reversed(_config_dirs(environ, etc))), etc]
    if not (named and Path(named).exists()) and environ.get("HOME"):
        home = Path(environ["HOME"])
        folders += [home / ".pip", Path(environ.get("XDG_CONFIG_HOME") or home / ".config") / "pip"]
    files = [folder / "pip.conf" for folder in (*folders, prefix)] + ([Path(named)] if named else [])
    return [path for path in files if path.is_file()]


def _config_dirs(environ: Mapping[str, str], etc: Path) -> list[Path]:
    named = environ.get("XDG_CONFIG_DIRS", "")
    return [Path(folder) for folder in named.split(":")] if named else [etc / "xdg"]


def _uv_file_index(environ: Mapping[str, str], etc: Path) -> tuple[str, str]:
    """The default index that a uv.toml names, and that file; two empty strings if none does."""
    home = Path(environ.get("HOME") or "/")
    user = Path(environ.get("XDG_CONFIG_HOME") or home / ".config")
    files = [folder / "uv/uv.toml" for folder in (user, *_config_dirs(environ, etc), etc)]
    if environ.get("UV_CONFIG_FILE"):
        files = [Path(environ["UV_CONFIG_FILE"])]
    if environ.get("UV_NO_CONFIG", "").lower() in ("1", "true", "yes"):
        files = []
    for path in files:
        try:
            data = tomllib.loads(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError):
            continue  # uv itself says what is wrong with its file
        pip = data.get("pip")
        found = [data.get("index-url"), pip.get("index-url") if isinstance(pip, dict) else None]
        rows = data.get("index")
        if isinstance(rows, list):
            found += [row.get("url") for row in rows if isinstance(row, dict) and row.get("default") is True]
        for url in found:
            if isinstance(url, str) and url:
                return url, str(path)
    return "", ""


def _certificates(environ: Mapping[str, str], pip: tuple[str, str]) -> str:
    """The CA certificates to trust: what is set for requests, pip or OpenSSL, else the system's own store."""
    named = [(environ.get(name, ""), f"${name}") for name in ("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE")]
    for value, origin in (*named, pip, (environ.get("SSL_CERT_FILE", ""), "$SSL_CERT_FILE")):
        if value and not Path(value).exists():
            raise UsageError(f"the certificate file {value} ({origin}) does not exist", hint=f"mend {origin}")
        if value:
            return value
    system = ssl.get_default_verify_paths()
    if Path(system.openssl_cafile).is_file():
        return system.openssl_cafile
    folder = Path(system.openssl_capath)
    return str(folder) if folder.is_dir() and next(folder.glob("*.0"), None) else ""


# --- HTTP ----------------------------------------------------------------------------------------


class TransientError(Exception):
    """A fault that may be gone the next time; `after` is the server's Retry-After in seconds, or None."""

    def __init__(self, message: str, after: float | None = None) -> None:
        super().__init__(message)
        self.after = after


class RefusedError(Exception):
    """An answer that asking again will not change. `status` is HTTP's, 0 if there was no answer at all."""

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """How long faults are borne.

    `attempts` in a row may fail without one new byte. The wait between them begins at about `first_wait`
    seconds, doubles, is jittered and never longer than `longest_wait`, which also caps Retry-After.
    `connect` and `read` are time-outs in seconds, `threads` how many transfers run at once.
    """

    attempts: int = 6
    first_wait: float = 1.0
    longest_wait: float = 60.0
    connect: float = 15.0
    read: float = 30.0
    threads: int = 6

    def wait(self, failures: int, after: float | None) -> float:
        """Seconds to wait after the `failures`-th failure in a row (from 1)."""
        backoff = self.first_wait * 2.0 ** (failures - 1) * random.uniform(0.5, 1.0)  # noqa: S311
        return min(max(backoff, after or 0.0), self.longest_wait)

    def retry(self, call: Callable[[], T], *, stop: threading.Event | None = None) -> T:
        """`call()` until it raises no TransientError; the last one comes through. `stop` ends a wait."""
        import tenacity

        def wait(state: tenacity.RetryCallState) -> float:
            error = state.outcome.exception() if state.outcome else None
            return self.wait(state.attempt_number, getattr(error, "after", None))

        retrying = tenacity.Retrying(
            stop=tenacity.stop_after_attempt(self.attempts),
            wait=wait,
            retry=tenacity.retry_if_exception_type(TransientError),
            sleep=tenacity.sleep_using_event(stop or threading.Event()),
            reraise=True,
        )
        return retrying(call)


class Source(Protocol):
    """Where packages come from, as HTTP needs to know it: a package index, or conda's channels."""

    @property
    def certificates(self) -> str:
        """A file or folder of CA certificates, empty for those of the libraries."""

    @property
    def proxy(self) -> str:
        """A URL, empty for what the environment says."""

    def login(self, url: str) -> Login:
        """What a request for `url` authenticates itself with; None leaves it to the user's netrc."""


class Web:
    """One HTTP session with the certificates, the proxy and the credentials of a source of packages.

    Nothing is decoded: bytes come as they are stored.
    """

    def __init__(self, source: Source, *, patience: Patience | None = None) -> None:
        import requests

        self.patience = patience or Patience()
        self._source = source
        self._session = requests.Session()
        self._session.headers.update({"Accept-Encoding": "identity", "User-Agent": "imagefactory"})
        if source.proxy:
            self._session.proxies = {"http": source.proxy, "https": source.proxy}
        adapter = requests.adapters.HTTPAdapter(pool_maxsize=self.patience.threads)
        for scheme in ("http://", "https://"):
            self._session.mount(scheme, adapter)

    def close(self) -> None:
        self._session.close()

    @contextmanager
    def open(
        self, url: str, *, method: str = "GET", headers: Mapping[str, str] | None = None
    ) -> Iterator[requests.Response]:
        """One request, its body not yet read. Raises TransientError or RefusedError, also from the body."""
        import requests

        shown = redact(url)
        try:
            with self._session.request(
                method,
                url,
                headers=dict(headers or {}),
                auth=self._source.login(url),
                stream=True,
                allow_redirects=True,
                timeout=(self.patience.connect, self.patience.read),
                # Given with each request: a session's own `verify` loses against REQUESTS_CA_BUNDLE.
                verify=self._source.certificates or True,
            ) as response:
                if response.status_code in _TRANSIENT_STATUS:
                    raise TransientError(
                        f"{shown} answered {response.status_code}", _retry_after(response.headers)
                    )
                if response.status_code >= 400:
                    raise RefusedError(f"{shown} answered {response.status_code}", response.status_code)
                yield response
        except requests.exceptions.SSLError as error:
            text = f"{shown}: {_reason(error)}"
            if "CERTIFICATE_VERIFY_FAILED" in text:
                raise RefusedError(text) from error
            raise TransientError(text) from error  # cut off in the middle
        except (
            requests.exceptions.ConnectionError,
            requests.exceptions.Timeout,
            requests.exceptions.ChunkedEncodingError,
            requests.exceptions.ContentDecodingError,
        ) as error:
            raise TransientError(f"{shown}: {_reason(error)}") from error
        except requests.exceptions.RequestException as error:  # not a URL, too many redirects
            raise RefusedError(f"{shown}: {_reason(error)}") from error

    def size(self, url: str) -> int:
        """Bytes of the file at `url`, asked without fetching it."""
        local = local_path(url)
        if local:
            if not local.is_file():
                raise RefusedError(f"{local} does not exist", 404)
            return local.stat().st_size

        def ask() -> int:
            with self.open(url, method="HEAD") as response:
                length = response.headers.get("Content-Length", "")
            if not length.isdigit():  # some servers tell only the size of what they send
                with self.open(url, headers={"Range": "bytes=0-0"}) as response:
                    length = response.headers.get("Content-Range", "").rpartition("/")[2]
            if not length.isdigit():
                raise RefusedError(f"{redact(url)}: the server does not say how long the file is")
            return int(length)

        return self.patience.retry(ask)

    def files(self, page: str) -> tuple[IndexFile, ...]:
        """All files that a project's page of the index lists (PEP 691's JSON, else PEP 503's HTML)."""
        local = local_path(page)
        if local:
            path = local / "index.html" if local.is_dir() else local
            if not path.is_file():
                raise RefusedError(f"{path} does not exist", 404)
            return _parse_html(path.read_text(encoding="utf-8"), local.as_uri() + "/")

        def ask() -> tuple[IndexFile, ...]:
            with self.open(page, headers={"Accept": _SIMPLE}) as response:
                text, kind = response.content.decode("utf-8"), response.headers.get("Content-Type", "")
                return (_parse_json if "json" in kind else _parse_html)(text, response.url)

        return self.patience.retry(ask)


def on_loopback(host: str) -> bool:
    """Whether a host name is this machine itself, which a container reaches in its network alone."""
    return host in ("localhost", "::1") or host.startswith("127.")


def local_path(url: str) -> Path | None:
    """The path of a `file:` URL, None for any other."""
    parts = urlsplit(url)
    return Path(unquote(parts.path)) if parts.scheme == "file" else None


def _reason(error: BaseException) -> str:
    """The innermost reason of a requests error, in words; the outer ones repeat it with addresses."""
    while True:
        inner = getattr(error, "reason", None) or (error.args[0] if error.args else None)
        if not isinstance(inner, BaseException):
            return re.sub(r"^<?\S+ object at 0x\w+>?: |^\S+\(host=.*?\): ", "", redact(str(inner or error)))
        error = inner


def _retry_after(headers: Mapping[str, str]) -> float | None:
    """Seconds of a Retry-After header. A date counts from the same answer's Date, so no clock is needed."""
    value = headers.get("Retry-After", "").strip()
    if value.isdigit():
        return float(value)
    try:
        asked, now = parsedate_to_datetime(value), parsedate_to_datetime(headers.get("Date", ""))
        return max((asked - now).total_seconds(), 0.0)
    except (TypeError, ValueError):
        return None


# --- a project's page ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexFile:
    """One file on a project's page; `sha256` is empty where the index does not tell it."""

    filename: str
    url: str
    sha256: str


def _parse_json(text: str, address: str) -> tuple[IndexFile, ...]:
    try:
        return tuple(
            IndexFile(
                filename=str(row["filename"]),
                url=urljoin(address, urldefrag(str(row["url"])).url),
                sha256=str(row["hashes"].get("sha256", "")),
            )
            for row in json.loads(text)["files"]
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise RefusedError(f"{redact(address)} is not a project's page (PEP 691): {error!r}") from error


def _parse_html(text: str, address: str) -> tuple[IndexFile, ...]:
    anchors = _Anchors()
    anchors.feed(text)
    found = []
    for target in anchors.targets:
        url, fragment = urldefrag(urljoin(address, target))
        digest = fragment.removeprefix("sha256=") if fragment.startswith("sha256=") else ""
        name = unquote(urlsplit(url).path.rpartition("/")[2])
        found.append(IndexFile(filename=name, url=url, sha256=digest.lower()))
    return tuple(found)


class _Anchors(html.parser.HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.targets: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        target = dict(attrs).get("href")
        if tag == "a" and target:
            self.targets.append(target)
