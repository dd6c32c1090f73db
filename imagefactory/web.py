"""HTTP that survives faults, and what of an address nobody may see.

No address is known here: whoever asks brings it, and says how the web is reached (`WebAccess`).
"""

from __future__ import annotations

import ipaddress
import re
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypeVar
from urllib.parse import unquote, urlsplit

from imagefactory.errors import without_logins

if TYPE_CHECKING:  # every command redacts, and few need HTTP: they do not wait for its import
    import requests
    import tenacity
    import urllib3


T = TypeVar("T")
Login: TypeAlias = "tuple[str, str] | Callable[[requests.PreparedRequest], requests.PreparedRequest] | None"
"""A user and password, or what adds them to a request; None for no answer."""


CHUNK = 1 << 16  # what a connection that breaks may cost: what came of a chunk is lost
_SLOWEST, _SLOW_SECONDS = 1000, 60.0  # as git's http.lowSpeedLimit and curl's --speed-limit are used
_DICE = Random()  # noqa: S311
_TOKEN = re.compile(r"(://[^\s/]+/t/)[^\s/]+")  # as conda writes one into a channel's address
_QUERY = re.compile(r"(/[^\s?#)]*)[?#][^\s)]*")


def redact(text: str) -> str:
    """`text` without the passwords, tokens and queries of the URLs in it, fit for a message or a log."""
    return _TOKEN.sub(r"\1****", _QUERY.sub(r"\1", without_logins(text)))


class TransientError(Exception):
    """A fault that may be gone the next time; `after` is the server's Retry-After in seconds, or None.

    `status` is HTTP's, 0 if there was no answer at all.
    """

    def __init__(self, message: str, *, after: float | None = None, status: int = 0) -> None:
        super().__init__(message)
        self.after, self.status = after, status


class RefusedError(Exception):
    """An answer that asking again will not change. `status` is HTTP's, 0 if there was none at all.

    `code` is what a registry calls it (`MANIFEST_UNKNOWN`).
    """

    def __init__(self, message: str, *, status: int = 0, code: str = "") -> None:
        super().__init__(message)
        self.status, self.code = status, code


def may_pass(status: int) -> bool:
    """Whether the same request may be answered another time."""
    return status in (408, 425, 429) or (status >= 500 and status != 501)


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """How long faults are borne.

    `attempts` in a row may fail without one new byte. The wait between them begins at about `first_wait`
    seconds, doubles, is jittered and never longer than `longest_wait`, which also caps Retry-After.
    `connect`, `read` and `commit` are time-outs in seconds; a registry may hash a whole blob before it
    answers the request that ends its upload. `threads` is how many transfers run at once.
    """

    attempts: int = 6
    first_wait: float = 1.0
    longest_wait: float = 60.0
    connect: float = 15.0
    read: float = 30.0
    commit: float = 300.0
    threads: int = 6

    def wait(self, failures: int, after: float | None, dice: Random = _DICE) -> float:
        """Seconds to wait after the `failures`-th failure in a row (from 1)."""
        backoff = self.first_wait * 2.0 ** (failures - 1) * dice.uniform(0.5, 1.0)
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


class WebAccess(Protocol):
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

    def __init__(self, source: WebAccess, *, patience: Patience | None = None) -> None:
        self.patience = patience or Patience()
        self._source = source
        self._session = _careful_session()
        self._session.headers.update({"Accept-Encoding": "identity", "User-Agent": "imagefactory"})
        if source.proxy:
            self._session.proxies = {"http": source.proxy, "https": source.proxy}
        mount_timely(self._session, threads=self.patience.threads)

    def close(self) -> None:
        self._session.close()

    @contextmanager
    def open(
        self, url: str, *, method: str = "GET", headers: Mapping[str, str] | None = None
    ) -> Iterator[requests.Response]:
        """One request, its body not yet read. Raises TransientError or RefusedError, also from the body."""
        import requests
        import urllib3

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
                status = response.status_code
                if may_pass(status):
                    after = retry_after(response.headers)
                    raise TransientError(f"{shown} answered {status}", after=after, status=status)
                if status >= 400:
                    raise RefusedError(f"{shown} answered {status}", status=status)
                yield response
        except (requests.exceptions.SSLError, urllib3.exceptions.SSLError) as error:
            text = f"{shown}: {reason_of(error)}"
            if "CERTIFICATE_VERIFY_FAILED" in text:
                raise RefusedError(text) from error
            raise TransientError(text) from error  # cut off in the middle
        except (
            requests.exceptions.ConnectionError,
            requests.exceptions.Timeout,
            requests.exceptions.ChunkedEncodingError,
            requests.exceptions.ContentDecodingError,
            urllib3.exceptions.HTTPError,
        ) as error:
            raise TransientError(f"{shown}: {reason_of(error)}") from error
        except requests.exceptions.RequestException as error:  # not a URL, too many redirects
            raise RefusedError(f"{shown}: {reason_of(error)}") from error

    def size(self, url: str) -> int:
        """Bytes of the file at `url`, asked without fetching it."""
        local = local_path(url)
        if local:
            if not local.is_file():
                raise RefusedError(f"{local} does not exist", status=404)
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


class _Timely:
    """A connection that waits for the head of an answer a minute longer than for its first byte.

    A header now and then keeps every time-out away.
    """

    sock: socket.socket
    timeout: float | None

    def getresponse(self) -> urllib3.BaseHTTPResponse:
        late = threading.Event()

        def cut(sock: socket.socket = self.sock) -> None:
            late.set()
            with suppress(OSError):  # of a TLS connection too: whoever reads finds its end
                socket.socket.shutdown(sock, socket.SHUT_RDWR)

        timer = threading.Timer((self.timeout or 0.0) + _SLOW_SECONDS, cut)
        timer.daemon = True
        timer.start()
        try:
            response: urllib3.BaseHTTPResponse = super().getresponse()  # type: ignore[misc]
        finally:
            timer.cancel()
        if late.is_set():  # cut headers look like whole ones
            raise TimeoutError
        return response


def _careful_session() -> requests.Session:
    """A session that sends no password of netrc where a redirect leads without TLS."""
    import requests

    class Session(requests.Session):
        def rebuild_auth(
            self, prepared_request: requests.PreparedRequest, response: requests.Response
        ) -> None:
            super().rebuild_auth(prepared_request, response)  # type: ignore[no-untyped-call]
            before, after = urlsplit(response.url), urlsplit(prepared_request.url or "")
            same = (before.scheme, before.netloc) == (after.scheme, after.netloc)
            if after.scheme != "https" and not same:
                prepared_request.headers.pop("Authorization", None)

    return Session()


def mount_timely(session: requests.Session, *, threads: int = 10) -> None:
    """Lets answers that never begin be no wait without end. `threads` is how many connections to one host."""
    from requests.adapters import HTTPAdapter
    from urllib3.connectionpool import HTTPConnectionPool, HTTPSConnectionPool

    pools = {}
    for scheme, kind in (("http", HTTPConnectionPool), ("https", HTTPSConnectionPool)):
        connection = type("TimelyConnection", (_Timely, kind.ConnectionCls), {})
        pools[scheme] = type("TimelyPool", (kind,), {"ConnectionCls": connection})

    class Adapter(HTTPAdapter):
        def init_poolmanager(self, *arguments: Any, **options: Any) -> None:
            super().init_poolmanager(*arguments, **options)
            self.poolmanager.pool_classes_by_scheme = pools

        def proxy_manager_for(self, *arguments: Any, **options: Any) -> Any:
            manager = super().proxy_manager_for(*arguments, **options)
            manager.pool_classes_by_scheme = pools
            return manager

    for scheme in pools:
        session.mount(f"{scheme}://", Adapter(pool_maxsize=threads))


def arriving(body: urllib3.BaseHTTPResponse, clock: Callable[[], float] = time.monotonic) -> Iterator[bytes]:
    """The bytes of an answer as they come, up to 64 KiB at once, nothing decoded.

    Raises RefusedError where a minute of waiting brings less than 1,000 bytes a second: a byte now and
    then keeps every time-out away, and would be waited for without end.
    """
    waited, came = 0.0, 0
    while True:
        began = clock()
        data = body.read1(CHUNK, decode_content=False)
        waited, came = waited + clock() - began, came + len(data)
        if not data:
            return
        if waited >= _SLOW_SECONDS:
            if came < waited * _SLOWEST:
                raise RefusedError(f"only {came} bytes came in {waited:.0f} seconds")
            waited, came = 0.0, 0
        yield data


def read_some(body: urllib3.BaseHTTPResponse, limit: int) -> bytes:
    """A whole answer of at most `limit` bytes. Raises RefusedError for a longer or endless one."""
    parts, size = [], 0
    for data in arriving(body):
        parts.append(data)
        size += len(data)
        if size > limit:
            raise RefusedError(f"the answer is longer than {limit:,} bytes")
    return b"".join(parts)


def on_loopback(host: str) -> bool:
    """Whether a host name is this machine itself, which a container reaches in its network alone."""
    return host in ("localhost", "::1") or host.startswith("127.")


def without_login(request: requests.PreparedRequest) -> requests.PreparedRequest:
    """A `Login` that adds nothing, and keeps a netrc from being asked."""
    return request


def sends_openly(url: str, known: Iterable[str] = ()) -> bool:
    """Return whether others could read a password that goes to `url`.

    Not with TLS, nor on this machine. Where `known` begins with its scheme, host and port, the user named it.
    """
    parts = urlsplit(url)
    host = parts.hostname or ""
    with suppress(ValueError):
        if ipaddress.ip_address(host).is_loopback:
            return False
    if parts.scheme == "https" or host == "localhost":
        return False
    return (parts.scheme, parts.hostname, parts.port) not in (
        (one.scheme, one.hostname, one.port) for one in map(urlsplit, known)
    )


def local_path(url: str) -> Path | None:
    """The path of a `file:` URL, None for any other."""
    parts = urlsplit(url)
    return Path(unquote(parts.path)) if parts.scheme == "file" else None


def reason_of(error: BaseException) -> str:
    """The innermost reason of a requests error, in words; the outer ones repeat it with addresses."""
    while True:
        inner = getattr(error, "reason", None)
        if not isinstance(inner, BaseException):
            inner = next((word for word in reversed(error.args) if isinstance(word, BaseException)), None)
        if inner is None:
            text = str(error) or type(error).__name__
            return re.sub(r"^<?\S+ object at 0x\w+>?: |^\S+\(host=.*?\): ", "", redact(text))
        error = inner


def retry_after(headers: Mapping[str, str]) -> float | None:
    """Seconds of a Retry-After header. A date counts from the same answer's Date, so no clock is needed."""
    value = headers.get("Retry-After", "").strip()
    if value.isdigit():
        return float(value)
    try:
        asked, now = parsedate_to_datetime(value), parsedate_to_datetime(headers.get("Date", ""))
        return max((asked - now).total_seconds(), 0.0)
    except (TypeError, ValueError):
        return None
