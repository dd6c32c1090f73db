"""Requests to one registry: signed, sent, tried again with patience, and told of where they fail."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeVar
from urllib.parse import urljoin, urlsplit
from weakref import WeakSet

import requests
import tenacity
import urllib3

from imagefactory.errors import RegistryError, UsageError
from imagefactory.oci.manifests import MANIFEST_LIMIT
from imagefactory.oci.registry.exchange import (
    Ask,
    RegistryOptions,
    host_of,
    may_be_plain,
    origin_of,
    parse_error,
)
from imagefactory.oci.registry.lists import ListReading, NoListError
from imagefactory.oci.registry.tokens import Tokens, parse_challenge
from imagefactory.oci.store import HOST, check_repository
from imagefactory.progress import format_seconds
from imagefactory.http import CHUNK, PUBLIC, RefusedError, TransientError, arriving, check_address, may_pass, open_session, reachable_from, reached_by, reaching, read_some, reason_of, retry_after

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
        self._tokens = Tokens(host, self.options, plain=plain, fetch=self._fetch)

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
                    raise RefusedError(
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
    def answer(self, ask: Ask) -> Iterator[Response]:
        """One request, its body not yet read. Raises TransientError or RefusedError, also from the body."""
        with self.faults():
            response = self.request(ask)
            try:
                if response.raw.length_remaining == 0:
                    response.raw.read()  # closed unread, it would take its connection along
                yield response
            finally:
                response.close()

    def request(self, ask: Ask) -> Response:
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

    def _send(self, ask: Ask, authorization: str) -> Response:
        """One request. Raises RefusedError for an address to which this registry may not send it."""
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
                auth=_Signature(authorization),
                stream=True,
                allow_redirects=ask.method in ("GET", "HEAD"),
                timeout=(patience.connect, patience.commit if ask.patient else patience.read),
                # Given with each request: a session's own `verify` loses against REQUESTS_CA_BUNDLE.
                verify=str(self.options.certificates or "") or True,
            )
        if ours:
            self._networks.add(reached_by((response.history or [response])[0]))
        return response

    def _check_elsewhere(self, ask: Ask) -> None:
        """What the registry names is asked by https unless it speaks http itself, and written to by https.

        One that is on no public network has its uploads on its own host: every other is somebody else's.
        """
        scheme, (host, reads) = urlsplit(ask.url).scheme, (host_of(ask.url), ask.method in ("GET", "HEAD"))
        if scheme != "https" and (scheme != "http" or not self.plain or not reads):
            raise RefusedError(f"it redirects a {ask.method} request to {host} without https")
        if not reads and reachable_from(self._networks or {PUBLIC}) != {PUBLIC}:
            raise RefusedError(f"it redirects a {ask.method} request to another host: {host}")

    def _fetch(self, ask: Ask, signed: str) -> bytes:
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
        NoListError where the first page has no such list, RefusedError for a list beyond what LIMITS says.
        """
        reading, found = ListReading(self.options.clock), list[T]()
        seen: set[str] = set()
        while url:
            if url in seen:
                raise RefusedError("the pages of its list form a loop")
            seen.add(url)
            reading.count(pages=1)
            page, url = self.retry(lambda url=url: self._page(repository, url, reading))  # type: ignore[misc]
            rows = page.get(key) if isinstance(page, dict) else None
            if rows is None and isinstance(page, dict) and key in page:
                rows = []  # null, as some registries write an empty list
            if not isinstance(rows, list):
                raise NoListError if len(seen) == 1 else RefusedError("a page of its list is not a list")
            reading.count(rows=len(rows))
            for row in rows:
                if (value := keep(row)) is not None:
                    found.append(value)
                    reading.count(rows=len(getattr(value, "annotations", ())))
        return found

    def _page(self, repository: str, url: str, reading: ListReading) -> tuple[Any, str]:
        try:
            with self.answer(Ask(method="GET", url=url, scope=self.scope(repository))) as response:
                data = bytearray()
                for part in arriving(response.raw):
                    data += part
                    reading.count(size=len(part))
                    if len(data) > MANIFEST_LIMIT:
                        raise RefusedError(f"a page of its list is longer than {MANIFEST_LIMIT:,} bytes")
                following = self._following(response)
        except RefusedError as error:
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
            raise RefusedError(f"its Link header is longer than {_LONGEST_LINK} characters")
        # An old Quay leaves out the < and > of RFC 8288.
        link = re.search(r'(?:<([^<>]+)>|^\s*([^<>;,\s]+))\s*;[^,]*\brel="?next\b', header)
        if link is None and re.search(r'\brel="?next\b', header):
            raise RefusedError(f"its Link header has no address: {self._clean(header)[:200]}")
        following = self.own(urljoin(response.url, link[1] or link[2])) if link else ""
        if following and not self.is_ours(following):
            raise RefusedError(f"the next page of its list is on another host: {host_of(following)}")
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
                raise RefusedError(text) from None
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
            raise RefusedError(self._clean(reason_of(error))) from None

    def _error(self, response: Response) -> TransientError | RefusedError:
        """What an answer that is no success says, in the registry's own words."""
        status, data = response.status_code, b""
        with suppress(RefusedError, urllib3.exceptions.HTTPError, OSError):
            for part in arriving(response.raw):
                data += part
                if len(data) > CHUNK:
                    break
        code, words = parse_error(data)
        response.close()
        text = self._clean(f"{status} {code} {words}")
        if may_pass(status):
            return TransientError(text, after=retry_after(response.headers), status=status)
        return RefusedError(text, status=status, code=code)

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
        except (TransientError, RefusedError) as error:
            message = f"{self.host}/{repository}: {doing}: {error}"
            hint = self._hint(error, repository)
            if error.status in (401, 403):
                raise RegistryError("registry-access-denied", message, hint=hint) from None
            if isinstance(error, TransientError):
                raise RegistryError("registry-unavailable", message, hint=hint) from None
            raise RegistryError("registry-request-failed", message, hint=hint) from None

    def _hint(self, error: TransientError | RefusedError, repository: str) -> str:
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


class _Signature(requests.auth.AuthBase):
    """An Authorization header; being there at all, it keeps requests from looking into ~/.netrc."""

    def __init__(self, value: str) -> None:
        self.value = value

    def __call__(self, request: requests.PreparedRequest) -> requests.PreparedRequest:
        if self.value:
            request.headers["Authorization"] = self.value
        return request
