"""Requests to one registry: signed, sent, tried again with patience, and told of where they fail."""

from __future__ import annotations

import json
import os
import re
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, TypeVar
from urllib.parse import urlencode, urljoin, urlsplit
from weakref import WeakSet

import requests
import tenacity
import urllib3

from imagefactory.errors import RegistryError, UsageError
from imagefactory.http import (
    CHUNK,
    PUBLIC,
    RejectedError,
    RetryPolicy,
    TransientError,
    arriving,
    check_address,
    may_pass,
    open_session,
    reachable_from,
    reaching,
    read_some,
    reason_of,
    retry_after,
    routed_host,
)
from imagefactory.oci.credentials import Credential, Credentials, anonymous
from imagefactory.oci.manifests import MALFORMED, MANIFEST_LIMIT, Descriptor
from imagefactory.oci.store import HOST, check_repository
from imagefactory.progress import QUIET, format_bytes, format_seconds

# --- One exchange with a registry: what is asked, how long faults are borne, and what faults an answer
# tells


_RETRY_POLICY = RetryPolicy(first_wait=0.5, longest_wait=30.0, read=60.0)
SMALL = 1 << 20  # a blob of up to this size goes with the closing PUT: one request less


@dataclass(frozen=True, slots=True, kw_only=True)
class RegistryOptions:
    """How a registry is reached.

    `certificates` is a file or folder of CA certificates (None: those of the libraries). `plain_hosts`
    (`host` or `host:port`) are asked by http, and so are this machine's own addresses unless
    `loopback_plain` is off; all others by https. `piece` is how many bytes of a blob one request
    carries, 0 for all that are left: docker's way, which all registries take. `tell` says one line to
    whoever watches.
    """

    credentials: Credentials = anonymous
    certificates: Path | None = None
    plain_hosts: Collection[str] = ()
    loopback_plain: bool = True
    patience: RetryPolicy = _RETRY_POLICY
    piece: int = 0
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    tell: Callable[[str], object] = QUIET.note
    random: Random = field(default_factory=Random)


def may_be_plain(host: str, options: RegistryOptions) -> bool:
    """Return whether `host` (with its port, if any) may be asked by http, credentials and all."""
    bare = re.sub(r":\d+$", "", host)
    here = bare.lower() in ("127.0.0.1", "localhost", "[::1]") and options.loopback_plain
    return here or bool({host, bare} & set(options.plain_hosts))


@dataclass(frozen=True, slots=True, kw_only=True)
class RegistryRequest:
    """One request. `scope` is what a token must allow; `body` is made anew each time it is sent."""

    method: str
    url: str
    scope: tuple[str, ...]
    headers: Mapping[str, str] = field(default_factory=dict)
    body: Callable[[], Iterable[bytes]] | bytes = b""
    patient: bool = False


def parse_error(data: bytes) -> tuple[str, str]:
    """Code and words of a registry's error; of another server's, what can be read as one line."""
    try:
        first = json.loads(data)["errors"][0]
        detail = first.get("detail")
        if isinstance(detail, dict):  # docker-registry's storage: {"Enclosed": {"Op": "write", "Err": 28}}
            number = (detail.get("Enclosed") or {}).get("Err")
            detail = os.strerror(number) if isinstance(number, int) else detail.get("message")
        words = [str(first.get("message") or ""), detail if isinstance(detail, str) else ""]
        return str(first.get("code") or ""), ": ".join(word for word in words if word)
    except MALFORMED:
        return "", re.sub(r"(?s)<(script|style).*?</\1>|<[^>]*>", " ", data.decode("utf-8", "replace"))


def origin_of(url: str) -> tuple[str, str, int]:
    parts = urlsplit(url)
    return parts.scheme, parts.hostname or "", parts.port or {"http": 80, "https": 443}.get(parts.scheme, 0)


def host_of(url: str) -> str:
    return urlsplit(url).hostname or "nowhere"


def short_of(descriptor: Descriptor) -> str:
    return f"{descriptor.digest[7:19]} ({format_bytes(descriptor.size)})"


# --- Who asks a registry: credentials, and the tokens that it wants for them
# Sources: RFC 6750; docker/distribution's token specification, OAuth2 where an identity token is kept.


_GIVERS = {  # whose tokens another host gives, as each of them documents; `docker login` sends there too
    "docker.io": "auth.docker.io",
    "index.docker.io": "auth.docker.io",
    "registry-1.docker.io": "auth.docker.io",
    "registry.gitlab.com": "gitlab.com",
}


_LONGEST = 8192  # of a challenge


@dataclass(frozen=True, slots=True, kw_only=True)
class _Token:
    value: str = field(repr=False)
    until: float


@dataclass(frozen=True, slots=True, kw_only=True)
class BearerChallenge:
    """What a Bearer challenge asks for."""

    realm: str
    service: str
    scope: tuple[str, ...]
    error: str


def parse_challenge(header: str) -> BearerChallenge | None:
    """The Bearer challenge of a WWW-Authenticate header (RFC 6750; docker's token specification)."""
    found = len(header) <= _LONGEST and re.search(
        r'(?i)\bBearer\s+((?:[a-z_]+\s*=\s*(?:"[^"]*"|[^\s,"]+)\s*(?:,\s*|$))+)', header
    )
    if not found:
        return None
    words = {
        name.lower(): quoted or plain
        for name, quoted, plain in re.findall(r'([A-Za-z_]+)\s*=\s*(?:"([^"]*)"|([^\s,"]+))', found[1])
    }
    realm = words.get("realm", "")
    if urlsplit(realm).scheme not in ("http", "https"):
        return None
    return BearerChallenge(
        realm=realm,
        service=words.get("service", ""),
        scope=tuple(words.get("scope", "").split()),
        error=words.get("error", ""),
    )


class TokenStore:
    """What one registry takes as proof of who asks: a password, or tokens that it gives for one.

    `fetch` asks, with an Authorization, and gives the body of a 200. Safe to use from several threads.
    """

    def __init__(
        self,
        host: str,
        options: RegistryOptions,
        *,
        plain: bool,
        fetch: Callable[[RegistryRequest, str], bytes],
    ) -> None:
        self._host, self._plain, self._fetch, self._options = host, plain, fetch, options
        self._credentials, self._clock, self._tell = options.credentials, options.clock, options.tell
        self._lock = threading.RLock()
        self.credential: Credential | None = None
        self.secrets: set[str] = set()
        self._looked_up = False
        self._basic = False
        self._challenge: BearerChallenge | None = None
        self._tokens: dict[tuple[str, ...], _Token] = {}
        self._told: set[str] = set()

    def authorization(self, scope: tuple[str, ...]) -> str:
        """The Authorization for `scope`, as far as the registry has said what it wants; else empty."""
        with self._lock:
            if self._basic:
                return self._login().basic
            if self._challenge is None:
                return ""
            token = self._tokens.get(scope)
            if token is None or self._clock() >= token.until:
                token = self._tokens[scope] = self._fetch_token(self._challenge, scope)
            return f"Bearer {token.value}"

    def renew(self, scope: tuple[str, ...], header: str, refused: str) -> str:
        """The Authorization to try after a 401 whose WWW-Authenticate is `header`, empty where there is none.

        `refused` is what was tried. Raises RejectedError where a user is wanted, or a token is not given.
        """
        challenge = parse_challenge(header)
        with self._lock:
            if challenge is None:
                if refused.startswith("Basic") or (header and not re.search(r"(?i)\bbasic\b", header)):
                    return ""
                if self._find() is None:
                    return ""
                self._basic = True
                return self._login().basic
            if challenge.error == "insufficient_scope" and refused and not challenge.scope:
                return ""
            self._challenge, self._basic = challenge, False
            held = self._tokens.get(scope)
            if held is None or f"Bearer {held.value}" == refused or challenge.scope:
                # Another thread may have brought a new one meanwhile: then that is tried first.
                if held is not None and f"Bearer {held.value}" != refused:
                    return f"Bearer {held.value}"
                wanted = challenge.scope or scope
                held = self._tokens[scope] = self._fetch_token(challenge, wanted)
            return f"Bearer {held.value}"

    def _fetch_token(self, challenge: BearerChallenge, scope: tuple[str, ...]) -> _Token:
        """A token by the docker token specification; by OAuth2 where an identity token is kept."""
        realm = urlsplit(challenge.realm)
        own = realm.netloc == self._host or may_be_plain(realm.netloc, self._options)
        if realm.scheme != "https" and not (self._plain and own):
            raise RejectedError(f"it requests a token from {host_of(challenge.realm)} without https")
        credential = self._find()
        if credential:
            self._tell_of(host_of(challenge.realm), credential)
        fields = [("service", challenge.service), *(("scope", word) for word in scope)]
        ask = RegistryRequest(
            method="GET",
            url=f"{challenge.realm}{'&' if '?' in challenge.realm else '?'}{urlencode(fields)}",
            scope=(),
        )
        signed = credential.basic if credential and credential.user else ""
        if credential and not credential.user:
            form = {"grant_type": "refresh_token", "client_id": "imagefactory", "service": challenge.service}
            form |= {"scope": " ".join(scope), "refresh_token": credential.secret}
            ask = RegistryRequest(
                method="POST",
                url=challenge.realm,
                scope=(),
                headers={"Content-Type": "application/x-www-form-urlencoded"},
                body=urlencode(form).encode(),
            )
        where = f"no token from {host_of(challenge.realm)}"
        try:
            data = self._fetch(ask, signed)
        except TransientError as error:
            if not error.status:
                raise
            raise TransientError(f"{where}: {error}", after=error.after, status=error.status) from None
        except RejectedError as error:
            if not error.status:
                raise
            raise RejectedError(f"{where}: {error}", status=401 if error.status == 401 else 403) from None
        try:
            value = json.loads(data)
            token = str(value.get("token") or value["access_token"])
            seconds = float(value.get("expires_in") or 60)  # what the specification says where it is silent
        except MALFORMED:
            raise TransientError(f"the response of {host_of(challenge.realm)} has no token") from None
        self.secrets.add(token)
        # Early enough that a request does not run out on its way.
        return _Token(value=token, until=self._clock() + seconds - min(10.0, seconds / 4))

    def _tell_of(self, giver: str, credential: Credential) -> None:
        """Says that a password goes to another host than the one it was left for, before it goes."""
        own = re.sub(r":\d+$", "", self._host).strip("[]").lower()
        if giver not in (own, _GIVERS.get(own)) and giver not in self._told:
            self._told.add(giver)
            self._tell(
                f"{self._host} has its tokens given by {giver}: "
                f"the credentials from {credential.origin or 'the settings'} go there"
            )

    def _find(self) -> Credential | None:
        if not self._looked_up:
            self.credential, self._looked_up = self._credentials(self._host), True
            if self.credential:
                self.secrets |= {self.credential.secret, self.credential.basic.partition(" ")[2]}
        return self.credential

    def _login(self) -> Credential:
        found = self._find()
        if found is None or not found.user:
            raise RejectedError("it requires a user and a password", status=401)
        return found


# --- What a list of a registry may cost: anyone who may push can make one long, and a registry without end


class NoListError(Exception):
    """An answer that is not a list, such as a page for people."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ListLimits:
    """Of one list: its pages, rows (with annotations of those kept), bytes in all, and its seconds."""

    pages: int
    rows: int
    size: int
    seconds: float


# A page of tags has 1,000 rows, one of referrers up to 4 MiB. The largest repositories of CI have some
# 100,000 tags, and an image has some statements per GPU.
LIMITS = ListLimits(pages=1000, rows=250_000, size=64 << 20, seconds=600.0)
MOST_IN_TAG = 2000
"""The rows of a list in a tag `sha256-<hex>` that are looked for, one request each."""


class ListReader:
    """One list as it is read: counts, and raises RejectedError that names the limit it is beyond."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock, self._began = clock, clock()
        self._pages = self._rows = self._size = 0

    def count(self, *, pages: int = 0, rows: int = 0, size: int = 0) -> None:
        self._pages, self._rows, self._size = self._pages + pages, self._rows + rows, self._size + size
        if self._pages > LIMITS.pages:
            raise RejectedError(f"its list has more than {LIMITS.pages:,} pages")
        if self._rows > LIMITS.rows:
            raise RejectedError(f"its list has more than {LIMITS.rows:,} rows")
        if self._size > LIMITS.size:
            raise RejectedError(f"its list has more than {LIMITS.size:,} bytes")
        if self._clock() - self._began > LIMITS.seconds:
            raise RejectedError(f"its list took more than {LIMITS.seconds:.0f} seconds")


T = TypeVar("T")
Response = requests.Response

_LONGEST_LINK = 8192
_TOO_LONG = 43200.0  # seconds: a registry that asks to wait longer is not asked again
_REFUSALS = 3  # in a row, each of a token made just before
_TLS_FOR_GOOD = ("CERTIFICATE_VERIFY_FAILED", "WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "HTTP_REQUEST")
_PLAIN = "if {host} uses plain http, add it to the setting `plain-http`"
_HINTS = (
    ("CERTIFICATE_VERIFY_FAILED", "set `certificates` (imagefactory.toml) to a file with the CA of {host}"),
    ("WRONG_VERSION_NUMBER", _PLAIN),
    ("RECORD_LAYER_FAILURE", _PLAIN),
    ("HTTP_REQUEST", _PLAIN),
    ("HTTP request to an HTTPS server", "remove {host} from the setting `plain-http`: it uses https"),
    ("Connection refused", "check that a registry runs at {host}"),
    ("resolve", "check the spelling of {host}, and the network"),
    ("must not redirect", "ask the operator of {host} to use its own address there, or a public one"),
    ("no space left", "the registry's disk is full: prune it, then run the same command again"),
    ("507 ", "the registry is full: prune it, then run the same command again"),
    ("is a web page", "check that {host} is the registry itself: a proxy or a login page answered"),
    ("schema 1", "docker pull it and push it again: its format is from before 2016"),
    ("413 ", "ask the operator of {host}: a proxy before the registry limits the size of a request"),
)


class RegistrySession:
    """How one registry is asked: its addresses, connections, tokens and faults.

    Safe to use from several threads.
    """

    def __init__(self, host: str, options: RegistryOptions) -> None:
        if not HOST.fullmatch(host):
            raise UsageError(
                "reference-invalid",
                f"'{host}' is not a registry",
                hint="write its host: registry.example.org[:port]",
            )
        port = re.search(r":(\d+)$", host)
        if port and not 0 < int(port[1]) < 65536:
            raise UsageError(
                "reference-invalid", f"'{host}' has an invalid port", hint="write a port of 1 to 65535"
            )
        self.host, self.options = host, options
        self._hub = host in ("docker.io", "index.docker.io", "registry-1.docker.io")
        name = "registry-1.docker.io" if self._hub else host
        bare = re.sub(r":\d+$", "", host)
        self._here = bare.lower() in ("127.0.0.1", "localhost", "[::1]")
        plain = may_be_plain(host, options)
        self.root = f"{'http' if plain else 'https'}://{name}"
        self._local = threading.local()
        self._connections: WeakSet[requests.Session] = WeakSet()  # they end with their threads
        self._connecting = threading.Lock()
        self._networks: set[str] = set()  # from which it answered
        self._tokens = TokenStore(host, self.options, plain=plain, fetch=self._fetch)

    @property
    def plain(self) -> bool:
        """Whether it is asked by http."""
        return self.root.startswith("http:")

    def close(self) -> None:
        """Lets go of the connections; a later call opens new ones."""
        with self._connecting:
            for connection in list(self._connections):
                connection.close()

    # --- names -----------------------------------------------------------------------------------

    def path(self, repository: str) -> str:
        check_repository(repository)
        return f"library/{repository}" if self._hub and "/" not in repository else repository

    def place(self, repository: str, rest: str) -> str:
        return f"{self.root}/v2/{self.path(repository)}/{rest}"

    def scope(self, repository: str, actions: str = "pull") -> tuple[str, ...]:
        return (f"repository:{self.path(repository)}:{actions}",)

    def own(self, url: str) -> str:
        """`url` with https where the registry is asked by https: proxies that end TLS often say http."""
        ours, theirs = urlsplit(self.root), urlsplit(url)
        if ours.scheme == "https" and theirs.scheme == "http" and ours.hostname == theirs.hostname:
            return theirs._replace(scheme="https", netloc=ours.netloc).geturl()
        return url

    def location(self, response: Response) -> str:
        place = response.headers.get("Location", "")
        return self.own(urljoin(response.url, place)) if place else ""

    def is_ours(self, url: str) -> bool:
        """Whether a credential may go there: the registry's own scheme, host and port."""
        return origin_of(url) == origin_of(self.root)

    # --- requests --------------------------------------------------------------------------------

    def retry(self, call: Callable[[], T], *, progress: Callable[[], int] = lambda: 0) -> T:
        """`call()` until it raises no TransientError; the last one comes through.

        What `progress` counts (bytes) makes the failures in a row begin anew whenever it grew.
        """
        patience, failures, refusals, seen = self.options.patience, 0, 0, progress()
        telling: TransientError | None = None

        def once() -> T:
            nonlocal failures, refusals, seen, telling
            try:
                return call()
            except TransientError as error:
                if (error.after or 0.0) > max(_TOO_LONG, patience.longest_wait):
                    raise RejectedError(
                        f"{error}; it asks to wait {format_seconds(error.after or 0.0)}", status=error.status
                    ) from error
                failures = 1 if progress() > seen else failures + 1
                refusals = min(refusals + 1, failures) if error.status == 401 else 0
                seen = max(seen, progress())
                if error.status:
                    telling = error
                raise

        def wait(state: tenacity.RetryCallState) -> float:
            error = state.outcome.exception() if state.outcome else None
            return patience.wait(failures, getattr(error, "after", None), self.options.random)

        def stop(state: tenacity.RetryCallState) -> bool:
            # Tokens made a moment ago and refused again and again: rarely a fault, mostly a missing right.
            late = (state.seconds_since_start or 0.0) >= patience.span
            return failures >= patience.attempts or refusals >= _REFUSALS or late

        retrying = tenacity.Retrying(
            stop=stop,
            wait=wait,
            retry=tenacity.retry_if_exception_type(TransientError),
            sleep=self.options.sleep,
            reraise=True,
        )
        try:
            return retrying(once)
        except TransientError as error:
            # A registry that hangs up on a long body said why only when its answer came through.
            raise (error if error.status or telling is None else telling) from None

    @contextmanager
    def answer(self, ask: RegistryRequest) -> Iterator[Response]:
        """One request, its body not yet read. Raises TransientError or RejectedError, also from the body."""
        with self.faults():
            response = self.request(ask)
            try:
                if response.raw.length_remaining == 0:
                    response.raw.read()  # closed unread, it would take its connection along
                yield response
            finally:
                response.close()

    def request(self, ask: RegistryRequest) -> Response:
        """As `_answer`, for who closes the response and minds the faults of its body."""
        with self.faults():
            signed = self._tokens.authorization(ask.scope) if self.is_ours(ask.url) else ""
            response = self._send(ask, signed)
            if response.status_code == 401 and self.is_ours(response.url):
                again = self._tokens.renew(ask.scope, response.headers.get("WWW-Authenticate", ""), signed)
                if not again:
                    raise self._error(response)
                response.close()
                response = self._send(ask, again)
                if response.status_code == 401 and again.startswith("Bearer"):
                    challenge = parse_challenge(response.headers.get("WWW-Authenticate", ""))
                    if not (challenge and challenge.error == "insufficient_scope"):
                        error = self._error(response)
                        raise TransientError(str(error), status=401)
            if response.status_code >= 300:
                raise self._error(response)
            return response

    def _send(self, ask: RegistryRequest, authorization: str) -> Response:
        """One request. Raises RejectedError for an address to which this registry may not send it."""
        check_address(ask.url)
        patience, ours = self.options.patience, self.is_ours(ask.url)
        if not ours:
            self._check_elsewhere(ask)
        with reaching(None if ours else reachable_from(self._networks or {PUBLIC})):
            response = self.connection().request(
                ask.method,
                ask.url,
                headers=dict(ask.headers),
                data=ask.body() if callable(ask.body) else ask.body,
                auth=_AuthorizationHeader(authorization),
                stream=True,
                allow_redirects=ask.method in ("GET", "HEAD"),
                timeout=(patience.connect, patience.commit if ask.patient else patience.read),
                # Given with each request: a session's own `verify` loses against REQUESTS_CA_BUNDLE.
                verify=str(self.options.certificates or "") or True,
            )
        if ours:
            self._networks.add(routed_host((response.history or [response])[0]))
        return response

    def _check_elsewhere(self, ask: RegistryRequest) -> None:
        """What the registry names is asked by https unless it speaks http itself, and written to by https.

        One that is on no public network has its uploads on its own host: every other is somebody else's.
        """
        scheme, (host, reads) = urlsplit(ask.url).scheme, (host_of(ask.url), ask.method in ("GET", "HEAD"))
        if scheme != "https" and (scheme != "http" or not self.plain or not reads):
            raise RejectedError(f"it redirects a {ask.method} request to {host} without https")
        if not reads and reachable_from(self._networks or {PUBLIC}) != {PUBLIC}:
            raise RejectedError(f"it redirects a {ask.method} request to another host: {host}")

    def _fetch(self, ask: RegistryRequest, signed: str) -> bytes:
        """The answer of who gives tokens."""
        with self.faults():
            response = self._send(ask, signed)
            try:
                if response.status_code != 200:
                    raise self._error(response)
                return read_some(response.raw, 1 << 20)
            finally:
                response.close()

    def connection(self) -> requests.Session:
        connection: requests.Session | None = getattr(self._local, "connection", None)
        if connection is None:
            connection = open_session(netrc=False)
            connection.trust_env = not self._here  # no proxy stands between this machine and itself
            self._local.connection = connection
            with self._connecting:
                self._connections.add(connection)
        return connection

    # --- lists -----------------------------------------------------------------------------------

    def rows(self, repository: str, url: str, key: str, keep: Callable[[Any], T | None]) -> list[T]:
        """Return what `keep` makes of the rows below `key`, on the page `url` and those that follow it.

        Rows of which `keep` makes None are dropped as they come. A 404 of tags is an empty list. Raises
        NoListError where the first page has no such list, RejectedError for a list beyond what LIMITS says.
        """
        reading, found = ListReader(self.options.clock), list[T]()
        seen: set[str] = set()
        while url:
            if url in seen:
                raise RejectedError("the pages of its list form a loop")
            seen.add(url)
            reading.count(pages=1)
            page, url = self.retry(lambda url=url: self._page(repository, url, reading))  # type: ignore[misc]
            rows = page.get(key) if isinstance(page, dict) else None
            if rows is None and isinstance(page, dict) and key in page:
                rows = []  # null, as some registries write an empty list
            if not isinstance(rows, list):
                raise NoListError if len(seen) == 1 else RejectedError("a page of its list is not a list")
            reading.count(rows=len(rows))
            for row in rows:
                if (value := keep(row)) is not None:
                    found.append(value)
                    reading.count(rows=len(getattr(value, "annotations", ())))
        return found

    def _page(self, repository: str, url: str, reading: ListReader) -> tuple[Any, str]:
        try:
            with self.answer(
                RegistryRequest(method="GET", url=url, scope=self.scope(repository))
            ) as response:
                data = bytearray()
                for part in arriving(response.raw):
                    data += part
                    reading.count(size=len(part))
                    if len(data) > MANIFEST_LIMIT:
                        raise RejectedError(f"a page of its list is longer than {MANIFEST_LIMIT:,} bytes")
                following = self._following(response)
        except RejectedError as error:
            if error.status == 404 and "/tags/list" in url:
                return {"tags": []}, ""
            raise
        try:
            return json.loads(data), following
        except (ValueError, RecursionError):
            raise TransientError("the response is not JSON") from None

    def _following(self, response: Response) -> str:
        """The page that comes next, empty for the last one."""
        header = response.headers.get("Link", "")
        if len(header) > _LONGEST_LINK:
            raise RejectedError(f"its Link header is longer than {_LONGEST_LINK} characters")
        # An old Quay leaves out the < and > of RFC 8288.
        link = re.search(r'(?:<([^<>]+)>|^\s*([^<>;,\s]+))\s*;[^,]*\brel="?next\b', header)
        if link is None and re.search(r'\brel="?next\b', header):
            raise RejectedError(f"its Link header has no address: {self._clean(header)[:200]}")
        following = self.own(urljoin(response.url, link[1] or link[2])) if link else ""
        if following and not self.is_ours(following):
            raise RejectedError(f"the next page of its list is on another host: {host_of(following)}")
        return following

    # --- faults ----------------------------------------------------------------------------------

    @contextmanager
    def faults(self) -> Iterator[None]:
        """Turns what requests and urllib3 raise into the two errors of exchange.py."""
        try:
            yield
        except (requests.exceptions.SSLError, urllib3.exceptions.SSLError) as error:
            text = self._clean(reason_of(error))
            if any(word in text for word in _TLS_FOR_GOOD):
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
            raise TransientError(self._clean(reason_of(error))) from None
        except (requests.exceptions.RequestException, ValueError) as error:  # also an address that is none
            raise RejectedError(self._clean(reason_of(error))) from None

    def _error(self, response: Response) -> TransientError | RejectedError:
        """What an answer that is no success says, in the registry's own words."""
        status, data = response.status_code, b""
        with suppress(RejectedError, urllib3.exceptions.HTTPError, OSError):
            for part in arriving(response.raw):
                data += part
                if len(data) > CHUNK:
                    break
        code, words = parse_error(data)
        response.close()
        text = self._clean(f"{status} {code} {words}")
        if may_pass(status):
            return TransientError(text, after=retry_after(response.headers), status=status)
        return RejectedError(text, status=status, code=code)

    def _clean(self, text: str) -> str:
        """One printable line of a fair length, without secrets and without the queries of addresses."""
        for secret in sorted(self._tokens.secrets, key=len, reverse=True):
            text = text.replace(secret, "***")
        text = re.sub(r"(/[^\s?#)]*)\?[^\s)'\"]*", r"\1", re.sub(r"(?<=://)[^\s/]*@", "", text))
        text = " ".join("".join(c if c.isprintable() else " " for c in text).split())
        return text if len(text) <= 300 else f"{text[:300]} ..."

    @contextmanager
    def told(self, repository: str, doing: str) -> Iterator[None]:
        """Turns the two errors of exchange.py into a RegistryError that says what, where and what to do."""
        try:
            yield
        except (TransientError, RejectedError) as error:
            message = f"{self.host}/{repository}: {doing}: {error}"
            hint = self._hint(error, repository)
            if error.status in (401, 403):
                raise RegistryError("registry-access-denied", message, hint=hint) from None
            if isinstance(error, TransientError):
                raise RegistryError("registry-unavailable", message, hint=hint) from None
            raise RegistryError("registry-request-failed", message, hint=hint) from None

    def _hint(self, error: TransientError | RejectedError, repository: str) -> str:
        status, text = error.status, str(error)
        if status == 401:
            found = self._tokens.credential
            known = f"the credentials from {found.origin or 'the settings'} were rejected; " if found else ""
            return f"{known}log in: docker login {self.host}"
        if status == 403:
            return f"log in with an account that has access to {repository}: docker login {self.host}"
        for word, hint in _HINTS:
            if word.lower() in text.lower():
                return hint.format(host=self.host)
        if status == 429:
            return "wait, or log in: it limits the rate of requests"
        if isinstance(error, TransientError):
            return "run the same command again: it resumes after what arrived"
        return ""

    def no_sense(self, repository: str, what: str) -> RegistryError:
        return RegistryError(
            "registry-response-invalid",
            f"{self.host}/{repository}: the response is not {what}",
            hint=f"check that {self.host} is a registry",
        )


class _AuthorizationHeader(requests.auth.AuthBase):
    """An Authorization header; being there at all, it keeps requests from looking into ~/.netrc."""

    def __init__(self, value: str) -> None:
        self.value = value

    def __call__(self, request: requests.PreparedRequest) -> requests.PreparedRequest:
        if self.value:
            request.headers["Authorization"] = self.value
        return request
