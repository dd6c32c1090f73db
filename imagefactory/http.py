"""HTTP that survives faults, and what of an address nobody may see.

No address is known here: whoever asks brings it, and says how the web is reached (`WebAccess`).
"""

from __future__ import annotations

import ipaddress
import math
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


class RejectedError(Exception):
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
class RetryPolicy:
    """How long faults are borne.

    `attempts` in a row may fail without one new byte. The wait between them begins at about `first_wait`
    seconds, doubles, is jittered and never longer than `longest_wait`, which also caps Retry-After.
    `connect`, `read` and `commit` are time-outs in seconds; a registry may hash a whole blob before it
    answers the request that ends its upload. `threads` is how many transfers run at once. After `span`
    seconds no other attempt begins.
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
            stop=tenacity.stop_after_attempt(self.attempts) | tenacity.stop_after_delay(self.span),
            wait=wait,
            retry=tenacity.retry_if_exception_type(TransientError),
            sleep=tenacity.sleep_using_event(stop or threading.Event()),
            reraise=True,
        )
        return retrying(call)


HURRIED = RetryPolicy(attempts=2, first_wait=0.5, longest_wait=1.0, connect=3.0, read=4.0, span=2.0)
"""How long a server is waited for where there is something else to go by: one that accepts and never answers
costs 4 seconds, and one that hangs up is asked once more."""


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


class HttpSession:
    """One HTTP session with the certificates, the proxy and the credentials of a source of packages.

    Nothing is decoded: bytes come as they are stored.
    """

    def __init__(self, source: WebAccess, *, patience: RetryPolicy | None = None) -> None:
        self.patience = patience or RetryPolicy()
        self._source = source
        self._session = open_session(threads=self.patience.threads)
        if source.proxy:
            self._session.proxies = {"http": source.proxy, "https": source.proxy}

    def close(self) -> None:
        self._session.close()

    @contextmanager
    def open(
        self, url: str, *, method: str = "GET", headers: Mapping[str, str] | None = None, data: bytes = b""
    ) -> Iterator[requests.Response]:
        """One request, its body not yet read. Raises TransientError or RejectedError, also from the body.

        A request that only reads follows redirects; to any other one a redirect is a refusal.
        """
        import requests
        import urllib3

        shown, reads = redact(url), method in ("GET", "HEAD")
        check_address(url)
        try:
            with self._session.request(
                method,
                url,
                headers=dict(headers or {}),
                data=data,
                auth=self._source.login(url),
                stream=True,
                allow_redirects=reads,
                timeout=(self.patience.connect, self.patience.read),
                # Given with each request: a session's own `verify` loses against REQUESTS_CA_BUNDLE.
                verify=self._source.certificates or True,
            ) as response:
                status = response.status_code
                if may_pass(status):
                    after = retry_after(response.headers)
                    raise TransientError(f"{shown} answered {status}", after=after, status=status)
                if status >= (400 if reads else 300):
                    raise RejectedError(f"{shown} answered {status}", status=status)
                yield response
        except (requests.exceptions.SSLError, urllib3.exceptions.SSLError) as error:
            text = f"{shown}: {reason_of(error)}"
            if "CERTIFICATE_VERIFY_FAILED" in text:
                raise RejectedError(text) from error
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
            raise RejectedError(f"{shown}: {reason_of(error)}") from error

    def size(self, url: str) -> int:
        """Bytes of the file at `url`, asked without fetching it."""
        local = local_path(url)
        if local:
            if not local.is_file():
                raise RejectedError(f"{local} does not exist", status=404)
            return local.stat().st_size

        def ask() -> int:
            with self.open(url, method="HEAD") as response:
                length = read_count(response.headers.get("Content-Length", ""))
            if length is None:  # some servers tell only the size of what they send
                with self.open(url, headers={"Range": "bytes=0-0"}) as response:
                    length = read_count(response.headers.get("Content-Range", "").rpartition("/")[2])
            if length is None:
                raise RejectedError(f"{redact(url)}: the server does not send the size of the file")
            return length

        return self.patience.retry(ask)


# --- where a request may go ----------------------------------------------------------------------

PUBLIC, PRIVATE, LOOPBACK, RESERVED = "public", "private", "loopback", "reserved"
_NAT64 = (ipaddress.ip_network("64:ff9b::/96"), ipaddress.ip_network("64:ff9b:1::/48"))
_SHARED = ipaddress.ip_network("100.64.0.0/10")  # RFC 6598: behind a carrier's NAT


def network_of(address: str) -> str:
    """Return the kind of network of an IP address: PUBLIC, PRIVATE, LOOPBACK or RESERVED.

    RESERVED are those where no registry or index is: link-local (the metadata services of clouds),
    multicast, unspecified and future use. An IPv4 address inside an IPv6 one counts as itself.
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
    """Return the network of a host that a proxy will look up: of an IP address or this machine's own name.

    Any other name counts as PUBLIC: only the proxy knows its address.
    """
    name = host.strip("[]").rstrip(".").lower()
    if name == "localhost" or name.endswith(".localhost"):
        return LOOPBACK
    try:
        return network_of(name)
    except ValueError:
        pass
    try:
        return network_of(socket.inet_ntoa(socket.inet_aton(name)))  # 127.1, 0x7f000001, 2130706433
    except (OSError, UnicodeError):
        return PUBLIC


def check_address(url: str) -> None:
    """Raise RejectedError for an address that two parsers read as two hosts, as `https://a\\@b/` is.

    A credential is held back by what one of them reads, and the other one connects.
    """
    from urllib3.util import parse_url

    try:
        ours, theirs = urlsplit(url), parse_url(url)
        same = (ours.hostname, ours.port) == ((theirs.host or "").strip("[]").lower() or None, theirs.port)
    except ValueError:
        same = False
    if not same:
        raise RejectedError("an address there has two possible hosts")


class _RequestReach(threading.local):
    """What the request that this thread sends may reach, and what its last connection reached.

    `networks` is None for an address that the user named: anything.
    """

    networks: frozenset[str] | None = None
    reached: str = PUBLIC

    def check(self, network: str, host: str) -> None:
        if self.networks is not None and network not in self.networks:
            raise RejectedError(
                f"{host} is on a {network} network, and another server must not redirect a request there"
            )


_REACH = _RequestReach()


@contextmanager
def reaching(networks: frozenset[str] | None) -> Iterator[None]:
    """Limit the requests of this thread to these networks; None sets no limit.

    Raises RejectedError, before a byte is sent, for a host with an address on another network.
    """
    before = _REACH.networks
    _REACH.networks = networks
    try:
        yield
    finally:
        _REACH.networks = before


def reachable_from(networks: Iterable[str]) -> frozenset[str]:
    """Return the networks that a server on one of these may send a client to: its own, and PUBLIC.

    One that is anywhere on PUBLIC sends to PUBLIC only.
    """
    own = frozenset(networks) - {RESERVED}
    return frozenset({PUBLIC}) if PUBLIC in own else own | {PUBLIC}


def routed_host(response: requests.Response) -> str:
    """Return the network of the server that gave this answer."""
    return str(getattr(response, "network", PUBLIC))


class _DeadlineConnection:
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


class _AddressCheckedConnection(_DeadlineConnection):
    """A direct connection that goes only where the request may: every address of the name is checked.

    It connects to an address that was checked, so a name server that answers otherwise the next time gains
    nothing.
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
        failure: Exception = NewConnectionError(self, f"{name} has no address")  # type: ignore[arg-type]
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
        if self.sock is not None:  # a connection of the pool may have been opened for another request
            _REACH.check(self.network, self._dns_host)
        super().request(*arguments, **options)  # type: ignore[misc]
        _REACH.reached = self.network


def open_session(*, threads: int = 10, netrc: bool = True) -> requests.Session:
    """Return a session whose connections are timely, and which follows a redirect only where it may go.

    No redirect leads from https to http, to RESERVED networks, or from one network to another that is not
    PUBLIC. A credential stays with its host. `threads` is how many connections to one host; without `netrc`
    nothing is read from ~/.netrc.
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
            came, goes = response.request.url or "", prepared_request.url or ""
            if came.startswith("https:") and not goes.startswith("https:"):
                raise RejectedError(f"it redirects from https to {redact(goes)}")
            check_address(goes)
            prepared_request.headers.pop("Cookie", None)
            _REACH.networks = reachable_from({routed_host(response)})
            if netrc:
                super().rebuild_auth(prepared_request, response)  # type: ignore[no-untyped-call]
            elif self.should_strip_auth(came, goes):  # type: ignore[no-untyped-call]
                prepared_request.headers.pop("Authorization", None)
            # requests itself asks netrc again for each host that it is led to.
            before, after = urlsplit(came), urlsplit(goes)
            if after.scheme != "https" and (before.scheme, before.netloc) != (after.scheme, after.netloc):
                prepared_request.headers.pop("Authorization", None)

        def send(self, request: requests.PreparedRequest, **options: Any) -> requests.Response:
            with reaching(_REACH.networks):  # what a redirect narrows ends with its request
                return super().send(request, **options)

    session = Session()
    session.headers.update({"Accept-Encoding": "identity", "User-Agent": "imagefactory"})
    session.cookies.set_policy(DefaultCookiePolicy(allowed_domains=()))  # nobody sets any here
    mount_with_deadline(session, threads=threads)
    return session


def mount_with_deadline(session: requests.Session, *, threads: int = 10) -> None:
    """Lets answers that never begin be no wait without end, and checks where connections go.

    `threads` is how many connections to one host. Where a proxy is used, it looks names up: then only
    addresses and this machine's own names are checked.
    """
    from requests.adapters import HTTPAdapter
    from requests.utils import select_proxy
    from urllib3.connectionpool import HTTPConnectionPool, HTTPSConnectionPool

    direct: dict[str, type] = {}
    proxied: dict[str, type] = {}
    for scheme, kind in (("http", HTTPConnectionPool), ("https", HTTPSConnectionPool)):
        for pools, own in ((direct, _AddressCheckedConnection), (proxied, _DeadlineConnection)):
            connection = type(f"{own.__name__}Connection", (own, kind.ConnectionCls), {})
            pools[scheme] = type(f"{own.__name__}Pool", (kind,), {"ConnectionCls": connection})

    class Adapter(HTTPAdapter):
        def init_poolmanager(self, *arguments: Any, **options: Any) -> None:
            super().init_poolmanager(*arguments, **options)
            self.poolmanager.pool_classes_by_scheme = direct

        def proxy_manager_for(self, proxy: str, **options: Any) -> Any:
            manager = super().proxy_manager_for(proxy, **options)
            if not proxy.lower().startswith("socks"):  # that has connections of its own
                manager.pool_classes_by_scheme = proxied
            return manager

        def send(self, request: requests.PreparedRequest, *arguments: Any, **options: Any) -> Any:
            proxies = options.get("proxies") or (arguments[4] if len(arguments) > 4 else None)
            if select_proxy(request.url or "", proxies):
                host = urlsplit(request.url or "").hostname or ""
                _REACH.reached = network_of_name(host)
                _REACH.check(_REACH.reached, host)
            response = super().send(request, *arguments, **options)
            response.network = _REACH.reached  # type: ignore[attr-defined]
            return response

    for scheme in direct:
        session.mount(f"{scheme}://", Adapter(pool_maxsize=threads))


def arriving(body: urllib3.BaseHTTPResponse, clock: Callable[[], float] = time.monotonic) -> Iterator[bytes]:
    """The bytes of an answer as they come, up to 64 KiB at once, nothing decoded.

    Raises RejectedError where a minute of waiting brings less than 1,000 bytes a second: a byte now and
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
                raise RejectedError(f"it sent only {came} bytes in {waited:.0f} seconds")
            waited, came = 0.0, 0
        yield data


def read_some(body: urllib3.BaseHTTPResponse, limit: int) -> bytes:
    """A whole answer of at most `limit` bytes. Raises RejectedError for a longer or endless one."""
    parts, size = [], 0
    for data in arriving(body):
        parts.append(data)
        size += len(data)
        if size > limit:
            raise RejectedError(f"the response is longer than {limit:,} bytes")
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


def read_count(text: str) -> int | None:
    """The number that a header gives, None for what is none; `²` is a digit too that int() does not take."""
    return int(text) if re.fullmatch(r"[0-9]{1,18}", text) else None


def retry_after(headers: Mapping[str, str]) -> float | None:
    """Seconds of a Retry-After header. A date counts from the same answer's Date, so no clock is needed."""
    value = headers.get("Retry-After", "").strip()
    if (seconds := read_count(value)) is not None:
        return float(seconds)
    try:
        asked, now = parsedate_to_datetime(value), parsedate_to_datetime(headers.get("Date", ""))
        return max((asked - now).total_seconds(), 0.0)
    except (TypeError, ValueError):
        return None
