"""HTTP for package indexes, channels, archives and registries: retries, limits, allowed networks.

Callers pass the address, and the certificates, proxy and login of its source (`WebAccess`).
"""

from __future__ import annotations

import ipaddress
import logging
import math
import re
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from functools import partial
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any, Protocol, Self, TypeAlias, TypeVar
from urllib.parse import unquote, urlsplit

from imagefactory.errors import redact

if TYPE_CHECKING:  # every command redacts, and few need HTTP: they do not wait for its import
    import requests
    import tenacity
    import urllib3
    from requests.adapters import HTTPAdapter

T = TypeVar("T")
Login: TypeAlias = "tuple[str, str] | Callable[[requests.PreparedRequest], requests.PreparedRequest] | None"
"""A user and password, or a function that adds them to a request; None leaves it to ~/.netrc."""
Response: TypeAlias = "requests.Response"
CHUNK = 1 << 16  # bytes lost at most when a connection breaks
_SLOWEST, _SLOW_SECONDS = 1000, 60.0  # as git's http.lowSpeedLimit and curl's --speed-limit are used
_LONGEST_RETRY_AFTER = 43200.0  # seconds
_REJECTED_TOKENS = 3
_LASTING_TLS_ERRORS = (
    "CERTIFICATE_VERIFY_FAILED",
    "WRONG_VERSION_NUMBER",
    "RECORD_LAYER_FAILURE",
    "HTTP_REQUEST",
)
_DICE = Random()  # noqa: S311
_LOG = logging.getLogger("imagefactory.http")


class HttpError(Exception):
    """A request that failed. `status` is the HTTP status, 0 without a response.

    `after` is the server's Retry-After in seconds, `code` a registry's error code (`MANIFEST_UNKNOWN`).
    """

    def __init__(self, message: str, *, status: int = 0, after: float | None = None, code: str = "") -> None:
        super().__init__(message)
        self.status, self.after, self.code = status, after, code


class TransientError(HttpError):
    """A fault that a later attempt may not have."""


class RejectedError(HttpError):
    """A response that another attempt would not change."""


def may_pass(status: int) -> bool:
    """Return whether a later attempt may get another status."""
    return status in (408, 425, 429) or (status >= 500 and status != 501)


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """The number, the waits and the timeouts of attempts.

    After `attempts` failures in a row without a new byte the last error is raised. The wait between attempts
    begins at about `first_wait` seconds, doubles, and is jittered. `longest_wait` limits it and Retry-After.
    `connect`, `read` and `commit` are timeouts in seconds; `commit` is longer, because a registry may hash a
    complete blob before it answers the last request of an upload. `threads` transfers run at once. No
    attempt begins more than `span` seconds after the first.
    """

    attempts: int = 6
    first_wait: float = 1.0
    longest_wait: float = 60.0
    connect: float = 15.0
    read: float = 30.0
    commit: float = 300.0
    threads: int = 6
    span: float = math.inf

    def wait(self, failures: int, after: float | None, dice: Random = _DICE) -> float:
        """Return the seconds to wait after the `failures`-th failure in a row (from 1)."""
        backoff = self.first_wait * 2.0 ** (failures - 1) * dice.uniform(0.5, 1.0)
        return min(max(backoff, after or 0.0), self.longest_wait)

    def retry(
        self,
        call: Callable[[], T],
        *,
        progress: Callable[[], int] = lambda: 0,
        sleep: Callable[[float], Any] = time.sleep,
        dice: Random = _DICE,
    ) -> T:
        """Return `call()`, which is called again while it raises TransientError.

        The count of failures restarts when `progress` (bytes) grew. Raises RejectedError if the server
        requires a wait of more than 12 hours.
        """
        import tenacity

        failures = rejected_tokens = 0
        most = progress()
        last_response: TransientError | None = None

        def attempt() -> T:
            nonlocal failures, rejected_tokens, most, last_response
            try:
                return call()
            except TransientError as error:
                if (error.after or 0.0) > max(_LONGEST_RETRY_AFTER, self.longest_wait):
                    text = f"{error}; the server requires a wait of {(error.after or 0.0) / 3600:.0f} hours"
                    raise RejectedError(text, status=error.status) from error
                failures = 1 if progress() > most else failures + 1
                # A new token that is rejected again and again is rarely a fault, mostly a missing permission.
                rejected_tokens = min(rejected_tokens + 1, failures) if error.status == 401 else 0
                most = max(most, progress())
                last_response = error if error.status else last_response
                raise

        def wait(state: tenacity.RetryCallState) -> float:
            error = state.outcome.exception() if state.outcome else None
            return self.wait(failures, getattr(error, "after", None), dice)

        def stop(state: tenacity.RetryCallState) -> bool:
            late = (state.seconds_since_start or 0.0) >= self.span
            return failures >= self.attempts or rejected_tokens >= _REJECTED_TOKENS or late

        retrying = tenacity.Retrying(
            stop=stop,
            wait=wait,
            retry=tenacity.retry_if_exception_type(TransientError),
            sleep=sleep,
            reraise=True,
        )
        try:
            return retrying(attempt)
        except TransientError as error:
            # A server that hangs up on a long body gave the reason only when its response came through.
            raise (error if error.status or last_response is None else last_response) from None


HURRIED = RetryPolicy(attempts=2, first_wait=0.5, longest_wait=1.0, connect=3.0, read=4.0, span=2.0)
"""The policy for a server with an alternative: one that never answers costs 4 seconds."""


class WebAccess(Protocol):
    """The access to a source of packages: a package index, or conda channels."""

    @property
    def certificates(self) -> str:
        """A file or directory of CA certificates, empty for the libraries' own."""

    @property
    def proxy(self) -> str:
        """The URL of a proxy, empty for the proxy of the environment."""

    def login(self, url: str) -> Login:
        """Return the login of a request for `url`."""


class HttpSession:
    """An HTTP session with the certificates, the proxy and the logins of a source of packages.

    Nothing is decoded: bytes stay as they are stored.
    """

    def __init__(self, source: WebAccess, *, retry_policy: RetryPolicy | None = None) -> None:
        self.retry_policy = retry_policy or RetryPolicy()
        self._source = source
        self._session = open_session(threads=self.retry_policy.threads)
        if source.proxy:
            self._session.proxies = {"http": source.proxy, "https": source.proxy}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._session.close()

    def request(
        self, url: str, read: Callable[[Response], T], *, method: str = "GET",
        headers: Mapping[str, str] | None = None, data: bytes = b"",
    ) -> T:  # fmt: skip
        """Return `read(response)` of a request that succeeds, with retries. Raises HttpError."""

        def once() -> T:
            with self.open(url, method=method, headers=headers, data=data) as response:
                return read(response)

        return self.retry_policy.retry(once)

    @contextmanager
    def open(
        self, url: str, *, method: str = "GET", headers: Mapping[str, str] | None = None, data: bytes = b""
    ) -> Iterator[Response]:
        """Send one request; its body is not read yet. Raises HttpError, also while the body is read.

        GET and HEAD follow redirects. For other methods a redirect is a RejectedError.
        """
        address = redact(url)
        with (
            translate_faults(lambda text: f"{address}: {text}"),
            send_request(
                self._session,
                method,
                url,
                headers=headers or {},
                data=data,
                auth=self._source.login(url),
                timeout=(self.retry_policy.connect, self.retry_policy.read),
                certificates=self._source.certificates,
            ) as response,
        ):
            status = response.status_code
            if may_pass(status):
                after = retry_after(response.headers)
                raise TransientError(f"{address} answered {status}", after=after, status=status)
            if status >= (400 if method in ("GET", "HEAD") else 300):
                raise RejectedError(f"{address} answered {status}", status=status)
            yield response

    def size(self, url: str) -> int:
        """Return the size in bytes of the file at `url`, without fetching it."""
        if local := local_path(url):
            if not local.is_file():
                raise RejectedError(f"{local} does not exist", status=404)
            return local.stat().st_size
        size = self.request(
            url, lambda response: read_count(response.headers.get("Content-Length", "")), method="HEAD"
        )
        if size is None:  # some servers give only the size of what they send
            size = self.request(
                url,
                lambda response: read_count(response.headers.get("Content-Range", "").rpartition("/")[2]),
                headers={"Range": "bytes=0-0"},
            )
        if size is None:
            raise RejectedError(f"{redact(url)}: the server does not send the size of the file")
        return size


def send_request(
    session: requests.Session,
    method: str,
    url: str,
    *,
    headers: Mapping[str, str],
    data: Iterable[bytes] | bytes,
    auth: Any,
    timeout: tuple[float, float],
    certificates: str,
) -> requests.Response:
    """Send one request. Only GET and HEAD follow redirects. The response's body is not read yet."""
    check_address(url)
    return session.request(
        method,
        url,
        headers=dict(headers),
        data=data,
        auth=auth,
        stream=True,
        allow_redirects=method in ("GET", "HEAD"),
        timeout=timeout,
        # Set for each request: a session's own `verify` loses against REQUESTS_CA_BUNDLE.
        verify=certificates or True,
    )


@contextmanager
def translate_faults(clean: Callable[[str], str]) -> Iterator[None]:
    """Raise TransientError or RejectedError for errors of requests and urllib3. `clean` formats the text."""
    import requests
    import urllib3

    try:
        yield
    except (requests.exceptions.SSLError, urllib3.exceptions.SSLError) as error:
        text = clean(reason_of(error))
        if any(word in text for word in _LASTING_TLS_ERRORS):
            raise RejectedError(text) from None
        raise TransientError(text) from None  # cut off in the middle
    except (
        requests.exceptions.ConnectionError,
        requests.exceptions.Timeout,
        requests.exceptions.ChunkedEncodingError,
        requests.exceptions.ContentDecodingError,
        urllib3.exceptions.HTTPError,
        ConnectionError,
        TimeoutError,
    ) as error:
        raise TransientError(clean(reason_of(error))) from None
    except (requests.exceptions.RequestException, ValueError) as error:  # not a URL, too many redirects
        raise RejectedError(clean(reason_of(error))) from None


# --- where a request may go ---

PUBLIC, PRIVATE, LOOPBACK, RESERVED = "public", "private", "loopback", "reserved"
_NAT64 = (ipaddress.ip_network("64:ff9b::/96"), ipaddress.ip_network("64:ff9b:1::/48"))
_SHARED = ipaddress.ip_network("100.64.0.0/10")  # RFC 6598: behind a carrier's NAT


def network_of(address: str) -> str:
    """Return the network of an IP address: PUBLIC, PRIVATE, LOOPBACK or RESERVED.

    RESERVED addresses never have a registry or index: link-local (the metadata services of clouds),
    multicast, unspecified and future use. An IPv4 address inside an IPv6 address counts as itself.
    """
    ip = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(ip, ipaddress.IPv6Address):
        inner = ip.ipv4_mapped or ip.sixtofour or (ip.teredo[1] if ip.teredo else None)
        if any(ip in network for network in _NAT64):
            inner = ipaddress.IPv4Address(ip.packed[-4:])
        if inner:
            return network_of(str(inner))
        if ip.is_site_local:
            return PRIVATE
    if ip.is_loopback:
        return LOOPBACK
    zero = ip.version == 4 and ip.packed[0] == 0  # "this network": Linux connects 0.0.0.0 to itself
    if zero or ip.is_link_local or ip.is_multicast or ip.is_unspecified or ip.is_reserved:
        return RESERVED
    if ip.is_private or ip in _SHARED:
        return PRIVATE
    return PUBLIC if ip.is_global else RESERVED


def network_of_name(host: str) -> str:
    """Return the network of a host that a proxy will look up: an IP address or a name of this machine.

    Any other name counts as PUBLIC, because only the proxy knows its address.
    """
    name = host.strip("[]").rstrip(".").lower()
    if name == "localhost" or name.endswith(".localhost"):
        return LOOPBACK
    with suppress(ValueError):
        return network_of(name)
    try:
        return network_of(socket.inet_ntoa(socket.inet_aton(name)))  # 127.1, 0x7f000001, 2130706433
    except (OSError, UnicodeError):
        return PUBLIC


def check_address(url: str) -> None:
    r"""Raise RejectedError for an address that two parsers read differently, such as `https://a\@b/`.

    One parser decides whether a credential is sent, the other one connects.
    """
    from urllib3.util import parse_url

    try:
        ours, theirs = urlsplit(url), parse_url(url)
        same = (ours.hostname, ours.port) == ((theirs.host or "").strip("[]").lower() or None, theirs.port)
    except ValueError:
        same = False
    if not same:
        raise RejectedError("the address is ambiguous: two URL parsers read different hosts in it")


class _RequestReach(threading.local):
    """The networks that this thread's current request may reach (None: any), and the one it reached."""

    networks: frozenset[str] | None = None
    reached: str = PUBLIC

    def check(self, network: str, host: str) -> None:
        if self.networks is not None and network not in self.networks:
            raise RejectedError(f"a redirect to {host} was blocked: it is on a {network} network")


_REACH = _RequestReach()


@contextmanager
def reaching(networks: frozenset[str] | None) -> Iterator[None]:
    """Limit the requests of this thread to these networks; None, for a user's address, sets no limit.

    Raises RejectedError, before a byte is sent, for a host with an address on another network.
    """
    before = _REACH.networks
    _REACH.networks = networks
    try:
        yield
    finally:
        _REACH.networks = before


def reachable_from(networks: Iterable[str]) -> frozenset[str]:
    """Return the networks to which a server may redirect a client: its own networks, and PUBLIC.

    A server with an address on PUBLIC may only redirect to PUBLIC.
    """
    local_networks = frozenset(networks) - {RESERVED}
    return frozenset({PUBLIC}) if PUBLIC in local_networks else local_networks | {PUBLIC}


def routed_host(response: requests.Response) -> str:
    """Return the network of the server that sent this response."""
    return str(getattr(response, "network", PUBLIC))


class _DeadlineConnection:
    """A connection that waits for a complete head at most a minute longer than for its first byte.

    Otherwise a server that sends a header line now and then would pass every timeout.
    """

    sock: socket.socket
    timeout: float | None

    def getresponse(self) -> urllib3.BaseHTTPResponse:
        late = threading.Event()

        def cut(sock: socket.socket = self.sock) -> None:
            late.set()
            with suppress(OSError):  # a TLS connection too: its reader finds the end
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


class _AddressCheckedConnection(_DeadlineConnection):
    """A direct connection. Every address of the name is checked before it connects to one of them.

    So a name server that returns another address the next time has no effect.
    """

    host: str
    port: int
    _dns_host: str
    network: str = RESERVED

    def _new_conn(self) -> socket.socket:
        from urllib3.exceptions import ConnectTimeoutError, NameResolutionError, NewConnectionError

        name = self._dns_host
        try:
            rows = socket.getaddrinfo(name.strip("[]"), self.port, 0, socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            cause = error if isinstance(error, socket.gaierror) else socket.gaierror(str(error))
            raise NameResolutionError(self.host, self, cause) from error  # type: ignore[arg-type]
        networks = {str(row[4][0]): network_of(str(row[4][0])) for row in rows}
        for network in networks.values():
            _REACH.check(network, name)
        failure: Exception = NewConnectionError(self, f"{name} has no IP address")  # type: ignore[arg-type]
        for address, network in networks.items():
            self._dns_host = address
            try:
                connected: socket.socket = super()._new_conn()  # type: ignore[misc]
            except (NewConnectionError, ConnectTimeoutError) as error:
                failure = error
            else:
                self.network = network
                return connected
            finally:
                self._dns_host = name
        raise failure

    def request(self, *arguments: Any, **options: Any) -> None:
        if self.sock is not None:  # a pooled connection may have been opened for another request
            _REACH.check(self.network, self._dns_host)
        super().request(*arguments, **options)  # type: ignore[misc]
        _REACH.reached = self.network


def open_session(*, threads: int = 10, netrc: bool = True) -> requests.Session:
    """Return a session that limits waits and follows a redirect only if it is allowed.

    No redirect leads from https to http, to RESERVED networks, or from one network to another that is not
    PUBLIC. A credential is sent only to its host. `threads` is the number of connections to one host.
    Without `netrc` nothing is read from ~/.netrc.
    """
    from http.cookiejar import DefaultCookiePolicy

    import requests

    class Session(requests.Session):
        def get_redirect_target(self, resp: requests.Response) -> str | None:
            # requests would read all of its body, decoded, however long it is.
            if resp.is_redirect and not resp._content_consumed:  # type: ignore[attr-defined]
                resp.raw.read1(CHUNK, decode_content=False)
                if resp.raw.length_remaining:
                    resp.raw.close()
                resp._content, resp._content_consumed = b"", True  # type: ignore[attr-defined]
            return super().get_redirect_target(resp)

        def rebuild_auth(
            self, prepared_request: requests.PreparedRequest, response: requests.Response
        ) -> None:
            origin, target = response.request.url or "", prepared_request.url or ""
            if origin.startswith("https:") and not target.startswith("https:"):
                raise RejectedError(
                    f"the server redirects from https to {redact(target)}, which is not https"
                )
            check_address(target)
            prepared_request.headers.pop("Cookie", None)
            _REACH.networks = reachable_from({routed_host(response)})
            if netrc:
                super().rebuild_auth(prepared_request, response)  # type: ignore[no-untyped-call]
            elif self.should_strip_auth(origin, target):  # type: ignore[no-untyped-call]
                prepared_request.headers.pop("Authorization", None)
            # requests reads netrc again for each host of a redirect.
            before, after = urlsplit(origin), urlsplit(target)
            if after.scheme != "https" and (before.scheme, before.netloc) != (after.scheme, after.netloc):
                prepared_request.headers.pop("Authorization", None)

        def send(self, request: requests.PreparedRequest, **options: Any) -> requests.Response:
            with reaching(_REACH.networks):  # a redirect's limit ends with its request
                return super().send(request, **options)

    session = Session()
    session.headers.update({"Accept-Encoding": "identity", "User-Agent": "imagefactory"})
    session.cookies.set_policy(DefaultCookiePolicy(allowed_domains=()))
    for scheme in ("http", "https"):
        session.mount(f"{scheme}://", _checking_adapter(threads))
    return session


def _checking_adapter(threads: int) -> HTTPAdapter:
    """Return an adapter with deadlines that checks the address of connections, and logs requests.

    A proxy looks names up itself. Then only IP addresses and this machine's own names are checked.
    """
    from requests.adapters import HTTPAdapter
    from requests.utils import select_proxy
    from urllib3.connectionpool import HTTPConnectionPool, HTTPSConnectionPool

    def pools(pool_type: type) -> dict[str, type]:
        return {
            scheme: type(
                f"{pool_type.__name__}Pool",
                (pool,),
                {
                    "ConnectionCls": type(
                        f"{pool_type.__name__}Connection", (pool_type, pool.ConnectionCls), {}
                    )
                },
            )
            for scheme, pool in (("http", HTTPConnectionPool), ("https", HTTPSConnectionPool))
        }

    class Adapter(HTTPAdapter):
        def init_poolmanager(self, *arguments: Any, **options: Any) -> None:
            super().init_poolmanager(*arguments, **options)
            self.poolmanager.pool_classes_by_scheme = pools(_AddressCheckedConnection)

        def proxy_manager_for(self, proxy: str, **options: Any) -> Any:
            manager = super().proxy_manager_for(proxy, **options)
            if not proxy.lower().startswith("socks"):  # that has its own connections
                manager.pool_classes_by_scheme = pools(_DeadlineConnection)
            return manager

        def send(self, request: requests.PreparedRequest, *arguments: Any, **options: Any) -> Any:
            proxies = options.get("proxies") or (arguments[4] if len(arguments) > 4 else None)
            if select_proxy(request.url or "", proxies):
                host = urlsplit(request.url or "").hostname or ""
                _REACH.reached = network_of_name(host)
                _REACH.check(_REACH.reached, host)
            began = time.monotonic()
            try:
                response = super().send(request, *arguments, **options)
            except Exception as error:
                _log_request(request, reason_of(error), began)
                raise
            response.network = _REACH.reached  # type: ignore[attr-defined]
            if _LOG.isEnabledFor(logging.DEBUG):
                response.close = partial(_close_and_log, response, began)  # type: ignore[method-assign]
            return response

    return Adapter(pool_maxsize=threads)


def _close_and_log(response: requests.Response, began: float) -> None:
    with suppress(AttributeError):  # the second close
        del response.close
        size = getattr(response.raw, "_fp_bytes_read", 0)
        _log_request(response.request, f"{response.status_code}, {size} bytes received", began)
    response.close()


def _log_request(request: requests.PreparedRequest, outcome: str, began: float) -> None:
    size = request.headers.get("Content-Length") or "0"
    sent = "" if size == "0" else f"{size} bytes sent, "
    seconds = time.monotonic() - began
    _LOG.debug("%s %s: %s%s, %.3f s", request.method, redact(request.url or ""), sent, outcome, seconds)


def arriving(body: urllib3.BaseHTTPResponse, clock: Callable[[], float] = time.monotonic) -> Iterator[bytes]:
    """Yield the bytes of a body as they arrive, up to 64 KiB at once, without decoding.

    Raises RejectedError if less than 1,000 bytes a second arrive in a minute, because a server that sends a
    byte now and then passes every timeout.
    """
    seconds, size = 0.0, 0
    while True:
        began = clock()
        data = body.read1(CHUNK, decode_content=False)
        seconds, size = seconds + clock() - began, size + len(data)
        if not data:
            return
        if seconds >= _SLOW_SECONDS:
            if size < seconds * _SLOWEST:
                raise RejectedError(f"the server sent only {size} bytes in {seconds:.0f} seconds")
            seconds, size = 0.0, 0
        yield data


def read_some(body: urllib3.BaseHTTPResponse, limit: int) -> bytes:
    """Return a body of at most `limit` bytes. Raises RejectedError for a longer or endless one."""
    data = bytearray()
    for part in arriving(body):
        data += part
        if len(data) > limit:
            raise RejectedError(f"the response is longer than {limit:,} bytes")
    return bytes(data)


def on_loopback(host: str) -> bool:
    """Return whether a host name is this machine, which a container reaches only in its network."""
    return host in ("localhost", "::1") or host.startswith("127.")


def without_login(request: requests.PreparedRequest) -> requests.PreparedRequest:
    """Return the request unchanged: a `Login` that prevents requests from reading netrc."""
    return request


def sends_openly(url: str, known: Iterable[str] = ()) -> bool:
    """Return whether others could read a password that is sent to `url`.

    False with TLS, on this machine, and for a scheme, host and port in `known`, which the user named.
    """
    parts = urlsplit(url)
    host = parts.hostname or ""
    with suppress(ValueError):
        if ipaddress.ip_address(host).is_loopback:
            return False
    if parts.scheme == "https" or host == "localhost":
        return False
    origins = {(origin.scheme, origin.hostname, origin.port) for origin in map(urlsplit, known)}
    return (parts.scheme, parts.hostname, parts.port) not in origins


def local_path(url: str) -> Path | None:
    """Return the path of a `file:` URL, None for any other."""
    parts = urlsplit(url)
    return Path(unquote(parts.path)) if parts.scheme == "file" else None


def reason_of(error: BaseException) -> str:
    """Return the innermost reason of a requests error; the outer ones repeat it with addresses."""
    while True:
        inner = getattr(error, "reason", None)
        if not isinstance(inner, BaseException):
            inner = next((item for item in reversed(error.args) if isinstance(item, BaseException)), None)
        if inner is None:
            text = str(error) or type(error).__name__
            return re.sub(r"^<?\S+ object at 0x\w+>?: |^\S+\(host=.*?\): ", "", redact(text))
        error = inner


def read_count(text: str) -> int | None:
    """Return the number in a header, None for another text. (`²` is a digit too, which int() rejects.)"""
    return int(text) if re.fullmatch(r"[0-9]{1,18}", text) else None


def retry_after(headers: Mapping[str, str]) -> float | None:
    """Return the seconds of Retry-After. A date counts from the response's Date, so no clock is needed."""
    value = headers.get("Retry-After", "").strip()
    if (seconds := read_count(value)) is not None:
        return float(seconds)
    try:
        date, now = parsedate_to_datetime(value), parsedate_to_datetime(headers.get("Date", ""))
        return max((date - now).total_seconds(), 0.0)
    except (TypeError, ValueError):
        return None
