"""Requests to one registry: their addresses, credentials and tokens, limits of lists, and errors with hints.

Sources: RFC 6750; docker/distribution's token specification, OAuth2 for identity tokens.
"""

from __future__ import annotations

import json
import os
import re
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, TypeVar
from urllib.parse import urlencode, urljoin, urlsplit
from weakref import WeakSet

import requests
import urllib3

from imagefactory.errors import RegistryError, UsageError
from imagefactory.http import (
    CHUNK,
    PUBLIC,
    HttpError,
    RejectedError,
    RetryPolicy,
    TransientError,
    arriving,
    may_pass,
    open_session,
    reachable_from,
    reaching,
    read_some,
    retry_after,
    routed_host,
    send_request,
    translate_faults,
)
from imagefactory.oci.credentials import Credential, Credentials, anonymous
from imagefactory.oci.manifests import MALFORMED, MANIFEST_LIMIT, Descriptor
from imagefactory.oci.store import HOST, check_repository
from imagefactory.progress import QUIET, format_bytes

T = TypeVar("T")
Response = requests.Response
SMALL = 1 << 20  # a blob of up to this size is sent in the closing PUT, which saves a request
_HUB = ("docker.io", "index.docker.io", "registry-1.docker.io")
_TOKEN_HOSTS = dict.fromkeys(_HUB, "auth.docker.io") | {"registry.gitlab.com": "gitlab.com"}
"""Token hosts of other registries, as each documents; `docker login` sends passwords there too."""
_LONGEST_HEADER = 8192
_RETRY_POLICY = RetryPolicy(first_wait=0.5, longest_wait=30.0, read=60.0)
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


@dataclass(frozen=True, slots=True, kw_only=True)
class RegistryOptions:
    """Options for the connection to a registry.

    `certificates` is a file or directory of CA certificates (None: those of the libraries). `plain_hosts`
    (`host` or `host:port`) use http, and so do this machine's own addresses unless `loopback_plain` is off.
    All others use https. `piece` is the bytes of a blob in one request, 0 for all of them as in docker,
    which all registries accept. `tell` prints one line to the user.
    """

    credentials: Credentials = anonymous
    certificates: Path | None = None
    plain_hosts: Collection[str] = ()
    loopback_plain: bool = True
    retry_policy: RetryPolicy = _RETRY_POLICY
    piece: int = 0
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    tell: Callable[[str], object] = QUIET.note
    random: Random = field(default_factory=Random)


@dataclass(frozen=True, slots=True, kw_only=True)
class RegistryRequest:
    """One request. A token must allow `scope`. A callable `body` is called for each attempt."""

    method: str
    url: str
    scope: tuple[str, ...] = ()
    headers: Mapping[str, str] = field(default_factory=dict)
    body: Callable[[], Iterable[bytes]] | bytes = b""
    patient: bool = False


def may_be_plain(host: str, options: RegistryOptions) -> bool:
    """Return whether requests to `host` (with its port, if any) may use http, credentials included."""
    bare = re.sub(r":\d+$", "", host)
    here = bare.lower() in ("127.0.0.1", "localhost", "[::1]") and options.loopback_plain
    return here or bool({host, bare} & set(options.plain_hosts))


def parse_error(data: bytes) -> tuple[str, str]:
    """Return code and message of a registry's error; for another body, its text without tags."""
    try:
        error = json.loads(data)["errors"][0]
        detail = error.get("detail")
        if isinstance(detail, dict):  # docker-registry's storage: {"Enclosed": {"Op": "write", "Err": 28}}
            number = (detail.get("Enclosed") or {}).get("Err")
            detail = os.strerror(number) if isinstance(number, int) else detail.get("message")
        texts = [str(error.get("message") or ""), detail if isinstance(detail, str) else ""]
        return str(error.get("code") or ""), ": ".join(filter(None, texts))
    except MALFORMED:
        return "", re.sub(r"(?s)<(script|style).*?</\1>|<[^>]*>", " ", data.decode("utf-8", "replace"))


def host_of(url: str) -> str:
    return urlsplit(url).hostname or "nowhere"


def short_of(descriptor: Descriptor) -> str:
    return f"{descriptor.digest[7:19]} ({format_bytes(descriptor.size)})"


# --- credentials and tokens ---


@dataclass(frozen=True, slots=True, kw_only=True)
class _Token:
    header: str = field(repr=False)
    expires: float


@dataclass(frozen=True, slots=True, kw_only=True)
class BearerChallenge:
    """The token that a registry requires, and the address to request the token."""

    realm: str
    service: str
    scope: tuple[str, ...]
    error: str


def parse_challenge(header: str) -> BearerChallenge | None:
    """Return the Bearer challenge of a WWW-Authenticate header (RFC 6750), None without one."""
    match = len(header) <= _LONGEST_HEADER and re.search(
        r'(?i)\bBearer\s+((?:[a-z_]+\s*=\s*(?:"[^"]*"|[^\s,"]+)\s*(?:,\s*|$))+)', header
    )
    if not match:
        return None
    fields = {
        name.lower(): quoted or plain
        for name, quoted, plain in re.findall(r'([A-Za-z_]+)\s*=\s*(?:"([^"]*)"|([^\s,"]+))', match[1])
    }
    realm = fields.get("realm", "")
    if urlsplit(realm).scheme not in ("http", "https"):
        return None
    return BearerChallenge(
        realm=realm,
        service=fields.get("service", ""),
        scope=tuple(fields.get("scope", "").split()),
        error=fields.get("error", ""),
    )


class TokenStore:
    """The password of one registry, or the tokens that it issues for the password.

    `fetch` sends a request with an Authorization and returns the body of a 200. Thread-safe.
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
        self._lock = threading.RLock()
        self.credential: Credential | None = None
        self.secrets: set[str] = set()
        self._looked_up = self._basic = False
        self._challenge: BearerChallenge | None = None
        self._tokens: dict[tuple[str, ...], _Token] = {}
        self._announced: set[str] = set()

    def authorization(self, scope: tuple[str, ...]) -> str:
        """Return the Authorization for `scope` if the registry already sent a challenge, else ""."""
        with self._lock:
            if self._basic:
                return self._login().basic
            if self._challenge is None:
                return ""
            token = self._tokens.get(scope)
            if token is None or self._options.clock() >= token.expires:
                token = self._tokens[scope] = self._fetch_token(self._challenge, scope)
            return token.header

    def renew(self, scope: tuple[str, ...], header: str, rejected: str) -> str:
        """Return the Authorization for the next attempt after a 401, "" for none.

        `header` is its WWW-Authenticate. `rejected` is the Authorization of the rejected request. Raises
        HttpError without a user or a token.
        """
        challenge = parse_challenge(header)
        with self._lock:
            if challenge is None:
                if rejected.startswith("Basic") or (header and not re.search(r"(?i)\bbasic\b", header)):
                    return ""
                if self._find() is None:
                    return ""
                self._basic = True
                return self._login().basic
            if challenge.error == "insufficient_scope" and rejected and not challenge.scope:
                return ""
            self._challenge, self._basic = challenge, False
            token = self._tokens.get(scope)
            # Another thread may have fetched a new token meanwhile: that one is tried first.
            if token is None or token.header == rejected:
                token = self._tokens[scope] = self._fetch_token(challenge, challenge.scope or scope)
            return token.header

    def _fetch_token(self, challenge: BearerChallenge, scope: tuple[str, ...]) -> _Token:
        """Fetch a token by docker's token specification, or by OAuth2 with an identity token."""
        realm, issuer = urlsplit(challenge.realm), host_of(challenge.realm)
        same_host = realm.netloc == self._host or may_be_plain(realm.netloc, self._options)
        if realm.scheme != "https" and not (self._plain and same_host):
            raise RejectedError(f"the registry asks for a token from {issuer}, which is not https")
        credential = self._find()
        if credential:
            self._announce(issuer, credential)
        if credential and not credential.user:
            form = {"grant_type": "refresh_token", "client_id": "imagefactory", "service": challenge.service}
            form |= {"scope": " ".join(scope), "refresh_token": credential.secret}
            headers = {"Content-Type": "application/x-www-form-urlencoded"}
            body = urlencode(form).encode()
            request = RegistryRequest(method="POST", url=challenge.realm, headers=headers, body=body)
        else:
            query = urlencode([("service", challenge.service), *(("scope", part) for part in scope)])
            separator = "&" if "?" in challenge.realm else "?"
            request = RegistryRequest(method="GET", url=f"{challenge.realm}{separator}{query}")
        try:
            data = self._fetch(request, credential.basic if credential and credential.user else "")
        except HttpError as error:
            if not error.status:
                raise
            text = f"no token from {issuer}: {error}"
            if isinstance(error, TransientError):
                raise TransientError(text, after=error.after, status=error.status) from None
            raise RejectedError(text, status=401 if error.status == 401 else 403) from None
        try:
            value = json.loads(data)
            token = str(value.get("token") or value["access_token"])
            seconds = float(value.get("expires_in") or 60)  # the specification's default
        except MALFORMED:
            raise TransientError(f"the response of {issuer} has no token") from None
        self.secrets.add(token)
        # Early enough that a request does not expire in transit.
        expires = self._options.clock() + seconds - min(10.0, seconds / 4)
        return _Token(header=f"Bearer {token}", expires=expires)

    def _announce(self, issuer: str, credential: Credential) -> None:
        """Tell the user, before a password is sent to another host than its own."""
        host_name = re.sub(r":\d+$", "", self._host).strip("[]").lower()
        if issuer not in (host_name, _TOKEN_HOSTS.get(host_name)) and issuer not in self._announced:
            self._announced.add(issuer)
            self._options.tell(
                f"{self._host} has its tokens issued by {issuer}: "
                f"the credentials from {credential.origin or 'the settings'} are sent there"
            )

    def _find(self) -> Credential | None:
        if not self._looked_up:
            self.credential, self._looked_up = self._options.credentials(self._host), True
            if self.credential:
                self.secrets |= {self.credential.secret, self.credential.basic.partition(" ")[2]}
        return self.credential

    def _login(self) -> Credential:
        credential = self._find()
        if credential is None or not credential.user:
            raise RejectedError("the registry requires a user and a password", status=401)
        return credential


# --- limits of lists: anyone who may push can make one long, and a registry can make one endless ---


class NoListError(Exception):
    """A response that is not a list, such as a web page."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ListLimits:
    """Limits of one list: pages, rows (with annotations of the used ones), bytes and seconds."""

    pages: int
    rows: int
    size: int
    seconds: float


# A page of tags has 1,000 rows, one of referrers up to 4 MiB. The largest repositories of CI have some
# 100,000 tags, and an image has some statements per GPU.
LIMITS = ListLimits(pages=1000, rows=250_000, size=64 << 20, seconds=600.0)
MOST_IN_TAG = 2000
"""The most rows of a list in a tag `sha256-<hex>` that are queried, one request each."""


class ListReader:
    """Counts the cost of a list, and raises RejectedError for an exceeded limit."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock, self._began = clock, clock()
        self._pages = self._rows = self._size = 0

    def count(self, *, pages: int = 0, rows: int = 0, size: int = 0) -> None:
        self._pages, self._rows, self._size = self._pages + pages, self._rows + rows, self._size + size
        for amount, limit, unit in (
            (self._pages, LIMITS.pages, "pages"),
            (self._rows, LIMITS.rows, "rows"),
            (self._size, LIMITS.size, "bytes"),
        ):
            if amount > limit:
                raise RejectedError(f"the registry's list has more than {limit:,} {unit}")
        if self._clock() - self._began > LIMITS.seconds:
            raise RejectedError(f"the registry needed more than {LIMITS.seconds:.0f} seconds for a list")


class RegistrySession:
    """Addresses, connections, tokens and errors of one registry. Thread-safe."""

    def __init__(self, host: str, options: RegistryOptions) -> None:
        if not HOST.fullmatch(host):
            raise UsageError(
                "reference-invalid",
                f"'{host}' is not the host of a registry",
                hint="write a host such as registry.example.org[:port]",
            )
        port = re.search(r":(\d+)$", host)
        if port and not 0 < int(port[1]) < 65536:
            raise UsageError(
                "reference-invalid", f"'{host}' has an invalid port", hint="write a port of 1 to 65535"
            )
        self.host, self.options = host, options
        self.plain = may_be_plain(host, options)
        self.root = f"{'http' if self.plain else 'https'}://{_HUB[-1] if host in _HUB else host}"
        self._local = threading.local()
        self._connections: WeakSet[requests.Session] = WeakSet()  # they are closed with their threads
        self._connecting = threading.Lock()
        self._networks: set[str] = set()  # networks of its responses
        self._tokens = TokenStore(host, self.options, plain=self.plain, fetch=self._fetch)

    def close(self) -> None:
        """Close the connections; a later call opens new ones."""
        with self._connecting:
            for connection in list(self._connections):
                connection.close()

    # --- addresses

    def path(self, repository: str) -> str:
        check_repository(repository)
        return f"library/{repository}" if self.host in _HUB and "/" not in repository else repository

    def url(self, repository: str, rest: str) -> str:
        return f"{self.root}/v2/{self.path(repository)}/{rest}"

    def scope(self, repository: str, actions: str = "pull") -> tuple[str, ...]:
        return (f"repository:{self.path(repository)}:{actions}",)

    def location(self, response: Response) -> str:
        location = response.headers.get("Location", "")
        return self._own(urljoin(response.url, location)) if location else ""

    def _own(self, url: str) -> str:
        """Return `url` with https if the registry uses https. Proxies that end TLS often write http."""
        ours, theirs = urlsplit(self.root), urlsplit(url)
        if ours.scheme == "https" and theirs.scheme == "http" and ours.hostname == theirs.hostname:
            return theirs._replace(scheme="https", netloc=ours.netloc).geturl()
        return url

    def is_ours(self, url: str) -> bool:
        """Return whether the URL has the registry's scheme, host and port, so a credential may be sent."""
        ours, theirs = urlsplit(self.root), urlsplit(url)
        default = {"http": 80, "https": 443}.get
        return (ours.scheme, ours.hostname, ours.port or default(ours.scheme)) == (
            theirs.scheme,
            theirs.hostname,
            theirs.port or default(theirs.scheme),
        )

    # --- requests

    def retry(self, call: Callable[[], T], *, progress: Callable[[], int] = lambda: 0) -> T:
        """Return `call()` with the retries of the options."""
        options = self.options
        return options.retry_policy.retry(call, progress=progress, sleep=options.sleep, dice=options.random)

    @contextmanager
    def answer(self, request: RegistryRequest) -> Iterator[Response]:
        """Send one request. Its body is not read yet. Raises HttpError, also while the body is read."""
        with self.faults(), self.send(request) as response:
            if response.raw.length_remaining == 0:
                response.raw.read()  # an unread response would close its connection
            yield response

    def send(self, request: RegistryRequest) -> Response:
        """Send one request; the caller closes the response and handles faults of its body."""
        with self.faults():
            authorization = self._tokens.authorization(request.scope) if self.is_ours(request.url) else ""
            response = self._send(request, authorization)
            if response.status_code == 401 and self.is_ours(response.url):
                challenge = response.headers.get("WWW-Authenticate", "")
                renewed = self._tokens.renew(request.scope, challenge, authorization)
                if not renewed:
                    raise self._error(response)
                response.close()
                response = self._send(request, renewed)
                if response.status_code == 401 and renewed.startswith("Bearer"):
                    again = parse_challenge(response.headers.get("WWW-Authenticate", ""))
                    if not (again and again.error == "insufficient_scope"):
                        raise TransientError(str(self._error(response)), status=401)
            if response.status_code >= 300:
                raise self._error(response)
            return response

    def _send(self, request: RegistryRequest, authorization: str) -> Response:
        """Send one request. Raises RejectedError if this registry may not send requests to its address."""
        retry_policy, ours = self.options.retry_policy, self.is_ours(request.url)
        if not ours:
            self._check_elsewhere(request)
        with reaching(None if ours else reachable_from(self._networks or {PUBLIC})):
            response = send_request(
                self.connection(),
                request.method,
                request.url,
                headers=request.headers,
                data=request.body() if callable(request.body) else request.body,
                auth=_AuthorizationHeader(authorization),
                timeout=(retry_policy.connect, retry_policy.commit if request.patient else retry_policy.read),
                certificates=str(self.options.certificates or ""),
            )
        if ours:
            self._networks.add(routed_host((response.history or [response])[0]))
        return response

    def _check_elsewhere(self, request: RegistryRequest) -> None:
        """Raise RejectedError for an insecure redirect to another host.

        Other hosts must use https, or http for reading if the registry itself uses http. A registry that is
        not on a public network must have its uploads on its own host.
        """
        scheme, host = urlsplit(request.url).scheme, host_of(request.url)
        reads = request.method in ("GET", "HEAD")
        if scheme != "https" and (scheme != "http" or not self.plain or not reads):
            raise RejectedError(
                f"the registry redirects a {request.method} request to {host}, which is not https"
            )
        if not reads and reachable_from(self._networks or {PUBLIC}) != {PUBLIC}:
            raise RejectedError(f"the registry redirects a {request.method} request to another host: {host}")

    def _fetch(self, request: RegistryRequest, authorization: str) -> bytes:
        """Return the response of a host that issues tokens."""
        with self.faults(), self._send(request, authorization) as response:
            if response.status_code != 200:
                raise self._error(response)
            return read_some(response.raw, 1 << 20)

    def connection(self) -> requests.Session:
        """Return the connections of this thread."""
        connection: requests.Session | None = getattr(self._local, "connection", None)
        if connection is None:
            connection = open_session(netrc=False)
            bare = re.sub(r":\d+$", "", self.host).lower()
            # No proxy for this machine's own addresses.
            connection.trust_env = bare not in ("127.0.0.1", "localhost", "[::1]")
            self._local.connection = connection
            with self._connecting:
                self._connections.add(connection)
        return connection

    # --- lists

    def rows(self, repository: str, url: str, key: str, parse: Callable[[Any], T | None]) -> list[T]:
        """Return `parse(row)` of the rows below `key`, on the page `url` and the following pages.

        Rows for which `parse` returns None are dropped. A 404 of tags is an empty list. Raises NoListError
        if the first page has no such list, RejectedError for a list beyond LIMITS.
        """
        reading, values = ListReader(self.options.clock), list[T]()
        seen: set[str] = set()
        while url:
            if url in seen:
                raise RejectedError("the pages of the registry's list form a loop")
            seen.add(url)
            reading.count(pages=1)
            page, url = self.retry(lambda url=url: self._page(repository, url, reading))  # type: ignore[misc]
            rows = page.get(key) if isinstance(page, dict) else None
            if rows is None and isinstance(page, dict) and key in page:
                rows = []  # null, as some registries write an empty list
            if not isinstance(rows, list):
                raise (
                    NoListError
                    if len(seen) == 1
                    else RejectedError("a page of the registry's list is not a list")
                )
            reading.count(rows=len(rows))
            for row in rows:
                if (value := parse(row)) is not None:
                    values.append(value)
                    reading.count(rows=len(getattr(value, "annotations", ())))
        return values

    def _page(self, repository: str, url: str, reading: ListReader) -> tuple[Any, str]:
        request = RegistryRequest(method="GET", url=url, scope=self.scope(repository))
        try:
            with self.answer(request) as response:
                data = bytearray()
                for part in arriving(response.raw):
                    data += part
                    reading.count(size=len(part))
                    if len(data) > MANIFEST_LIMIT:
                        raise RejectedError(
                            f"a page of the registry's list is longer than {MANIFEST_LIMIT:,} bytes"
                        )
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
        """Return the address of the next page, empty for the last one."""
        header = response.headers.get("Link", "")
        if len(header) > _LONGEST_HEADER:
            raise RejectedError(f"the Link header is longer than {_LONGEST_HEADER} characters")
        # An old Quay omits the < and > of RFC 8288.
        link = re.search(r'(?:<([^<>]+)>|^\s*([^<>;,\s]+))\s*;[^,]*\brel="?next\b', header)
        if link is None and re.search(r'\brel="?next\b', header):
            raise RejectedError(f"the Link header has no address: {self._clean(header)[:200]}")
        following = self._own(urljoin(response.url, link[1] or link[2])) if link else ""
        if following and not self.is_ours(following):
            raise RejectedError(
                f"the next page of the registry's list is on another host: {host_of(following)}"
            )
        return following

    # --- faults

    def faults(self) -> AbstractContextManager[None]:
        return translate_faults(self._clean)

    def _error(self, response: Response) -> HttpError:
        """Return the error of a failed response, with the registry's own message."""
        status, data = response.status_code, b""
        with suppress(RejectedError, urllib3.exceptions.HTTPError, OSError):
            for part in arriving(response.raw):
                data += part
                if len(data) > CHUNK:
                    break
        code, message = parse_error(data)
        response.close()
        text = self._clean(f"{status} {code} {message}")
        if may_pass(status):
            return TransientError(text, after=retry_after(response.headers), status=status)
        return RejectedError(text, status=status, code=code)

    def _clean(self, text: str) -> str:
        """Return one printable line of limited length, without secrets and queries of addresses."""
        for secret in sorted(self._tokens.secrets, key=len, reverse=True):
            text = text.replace(secret, "***")
        text = re.sub(r"(/[^\s?#)]*)\?[^\s)'\"]*", r"\1", re.sub(r"(?<=://)[^\s/]*@", "", text))
        text = " ".join("".join(c if c.isprintable() else " " for c in text).split())
        return text if len(text) <= 300 else f"{text[:300]} ..."

    @contextmanager
    def reporting(self, repository: str, action: str) -> Iterator[None]:
        """Raise a RegistryError with action, place and hint for each HttpError."""
        try:
            yield
        except HttpError as error:
            message = f"{self.host}/{repository}: {action}: {error}"
            hint = self._hint(error, repository)
            if error.status in (401, 403):
                raise RegistryError("registry-access-denied", message, hint=hint) from None
            if isinstance(error, TransientError):
                raise RegistryError("registry-unavailable", message, hint=hint) from None
            raise RegistryError("registry-request-failed", message, hint=hint) from None

    def _hint(self, error: HttpError, repository: str) -> str:
        if error.status == 401:
            login, used = f"log in: docker login {self.host}", self._tokens.credential
            if used is None:
                return login
            return f"the credentials from {used.origin or 'the settings'} were rejected; {login}"
        if error.status == 403:
            return f"log in with an account that has access to {repository}: docker login {self.host}"
        for part, hint in _HINTS:
            if part.lower() in str(error).lower():
                return hint.format(host=self.host)
        if error.status == 429:
            return "wait, or log in: it limits the rate of requests"
        if isinstance(error, TransientError):
            return "run the same command again: it resumes after what arrived"
        return ""

    def invalid_response(self, repository: str, expected: str) -> RegistryError:
        return RegistryError(
            "registry-response-invalid",
            f"{self.host}/{repository}: the response is not {expected}",
            hint=f"check that {self.host} is a registry",
        )


class _AuthorizationHeader(requests.auth.AuthBase):
    """An Authorization header; its presence keeps requests from reading ~/.netrc."""

    def __init__(self, value: str) -> None:
        self.value = value

    def __call__(self, request: requests.PreparedRequest) -> requests.PreparedRequest:
        if self.value:
            request.headers["Authorization"] = self.value
        return request
