"""A registry as a Store: a small client of the OCI distribution specification that bears faults.

What may be gone the next time (408, 429, 5xx, resets, time-outs, truncated replies, tokens that ran
out, lost upload sessions) is tried again with jittered backoff; what a registry refuses is not. Nothing
counts as done because a request got an answer: blobs and manifests are asked for again by digest.

Sources: OCI distribution-spec 1.1; docker/distribution's token and upload pages.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TypeVar
from urllib.parse import urlencode, urljoin, urlsplit
from weakref import WeakSet

import requests
import tenacity
import urllib3

from imagefactory.errors import RegistryError, StoreError, UsageError
from imagefactory.oci.credentials import Credential
from imagefactory.oci.manifests import (
    INDEX_TYPE,
    MANIFEST_LIMIT,
    artifact_type,
    canonical_json,
    digest_of,
    format_descriptor,
    media_type_of,
    parse_descriptor,
)
from imagefactory.oci.model import Descriptor
from imagefactory.oci.registry.download import ACCEPT, skip_bytes
from imagefactory.oci.registry.exchange import (
    CHUNK,
    MALFORMED,
    SMALL,
    Ask,
    RefusedError,
    RegistryOptions,
    TransientError,
    host_of,
    origin_of,
    parse_error,
    read_some,
    reason_of,
    retry_after,
    short_of,
)
from imagefactory.oci.registry.session import HINTS, REFUSALS, TLS_FOR_GOOD, Connection, Signature
from imagefactory.oci.registry.tokens import Challenge, Token, parse_challenge
from imagefactory.oci.registry.upload import BINARY, LOST, range_end
from imagefactory.oci.store import HOST, Source, check_digest, check_repository, check_wanted

T = TypeVar("T")


class Registry:
    """The registry at `host` (`registry.example.org`, `127.0.0.1:5000`); `docker.io` is Docker Hub.

    Safe to use from several threads. Every method raises RegistryError for a registry that refuses,
    cannot be reached or keeps failing, and UsageError for what is no repository, tag or digest.
    """

    def __init__(self, host: str, options: RegistryOptions | None = None) -> None:
        if not HOST.fullmatch(host):
            raise UsageError(f"'{host}' is no registry", hint="write its host: registry.example.org[:port]")
        port = re.search(r":(\d+)$", host)
        if port and not 0 < int(port[1]) < 65536:
            raise UsageError(f"'{host}' has a port that cannot be", hint="write 1 to 65535 after the colon")
        self.host, self.options = host, options or RegistryOptions()
        self._hub = host in ("docker.io", "index.docker.io", "registry-1.docker.io")
        name = "registry-1.docker.io" if self._hub else host
        bare = re.sub(r":\d+$", "", host)
        self._here = bare.lower() in ("127.0.0.1", "localhost", "[::1]")
        listed = bool({host, bare} & set(self.options.plain_hosts))
        plain = listed or (self._here and self.options.loopback_plain)
        self._root = f"{'http' if plain else 'https'}://{name}"
        self._local = threading.local()
        self._sessions: WeakSet[requests.Session] = WeakSet()  # they end with their threads
        self._lock = threading.RLock()  # of credentials and tokens
        self._attaching = threading.Lock()
        self._credential: Credential | None = None
        self._looked_up = False
        self._basic = False
        self._challenge: Challenge | None = None
        self._tokens: dict[tuple[str, ...], Token] = {}
        self._secrets: set[str] = set()

    def __repr__(self) -> str:
        return f"Registry({self.host!r})"

    @property
    def name(self) -> str:
        return self.host

    @property
    def plain(self) -> bool:
        """Whether it is asked by http."""
        return self._root.startswith("http:")

    def close(self) -> None:
        """Lets go of the connections; a later call opens new ones."""
        with self._lock:
            for session in list(self._sessions):
                session.close()

    def check(self) -> None:
        """Asks whether this is a registry that takes the credentials (distribution-spec, end-1)."""
        ask = Ask(method="GET", url=f"{self._root}/v2/", scope=())

        def go() -> None:
            with self._answer(ask):
                pass

        with self._told("v2", "asking whether a registry is there"):
            self._retry(go)

    # --- blobs -----------------------------------------------------------------------------------

    def has(self, repository: str, descriptor: Descriptor) -> bool:
        place = self._place(repository, f"blobs/{check_digest(descriptor.digest)}")
        with self._told(repository, f"asking for blob {short_of(descriptor)}"):
            return self._retry(lambda: self._has(repository, place, descriptor))

    def _has(self, repository: str, place: str, descriptor: Descriptor) -> bool:
        try:
            with self._answer(Ask(method="HEAD", url=place, scope=self._scope(repository))) as response:
                length = response.headers.get("Content-Length", "")
        except RefusedError as error:
            if error.status == 404:
                return False
            raise
        return not length.isdigit() or int(length) == descriptor.size

    def read(self, repository: str, descriptor: Descriptor, offset: int = 0) -> Iterator[bytes]:
        """As Store has it; goes on where a connection breaks. A small blob is checked before it is given."""
        place = self._place(repository, f"blobs/{check_digest(descriptor.digest)}")
        reader = _Reader(self, repository, place, descriptor)
        with self._told(repository, f"fetching blob {short_of(descriptor)}"):
            if offset == 0 and descriptor.size <= SMALL:
                whole = self._retry(reader.whole)
                yield from (whole[i : i + CHUNK] for i in range(0, len(whole), CHUNK))
                return
            reader.position = offset
            sha256 = hashlib.sha256() if offset == 0 else None
            try:
                while data := self._retry(reader.next, progress=lambda: reader.position):
                    if sha256:
                        sha256.update(data)
                    yield data
            finally:
                reader.close()
            if sha256 and f"sha256:{sha256.hexdigest()}" != descriptor.digest:
                raise RefusedError("the bytes are not what the digest says")

    def write(self, repository: str, descriptor: Descriptor, source: Source) -> int:
        """As Store has it. Raises StoreError where `source` does not give the blob of `descriptor`."""
        place = self._place(repository, f"blobs/{check_digest(descriptor.digest)}")
        with self._told(repository, f"sending blob {short_of(descriptor)}"):
            try:
                if self._retry(lambda: self._has(repository, place, descriptor)):
                    return 0
            except TransientError as error:
                # A blob whose entry was cut by a full disk answers 500 (docker-registry 2.8) until the blob
                # is sent anew, and sending mends it.
                if error.status < 500:
                    raise
            upload = _Upload(self, repository, descriptor, source)
            try:
                self._retry(upload.go, progress=lambda: upload.offset)
            except Exception:
                upload.cancel()
                raise
            return upload.sent

    def mount(self, repository: str, descriptor: Descriptor, origin: str) -> bool:
        """As Store has it. A registry that may not or cannot mount says no; that is no error."""
        place = self._place(repository, f"blobs/{check_digest(descriptor.digest)}")
        query = urlencode({"mount": descriptor.digest, "from": self._path(origin)})
        url = self._place(repository, f"blobs/uploads/?{query}")
        scope = (*self._scope(repository, "pull,push"), *self._scope(origin))

        def ask() -> bool:
            try:
                with self._answer(Ask(method="POST", url=url, scope=scope)) as response:
                    made, upload = response.status_code == 201, self._location(response)
            except (RefusedError, TransientError) as error:
                if 400 <= error.status < 500 and error.status not in (408, 425, 429):
                    return False  # no such origin, or not for this account: writing may do
                raise
            if not made:
                self._forget(repository, upload)
                return False
            return self._has(repository, place, descriptor)

        with self._told(repository, f"mounting blob {short_of(descriptor)} from {origin}"):
            return self._retry(ask)

    def _forget(self, repository: str, upload: str) -> None:
        """Tells the registry that an upload ends here. A kindness: it sweeps what it is not told of."""
        if upload:
            with suppress(TransientError, RefusedError, RegistryError):
                ask = Ask(method="DELETE", url=upload, scope=self._scope(repository, "pull,push"))
                with self._answer(ask):
                    pass

    # --- manifests -------------------------------------------------------------------------------

    def manifest(self, repository: str, wanted: str) -> tuple[Descriptor, bytes] | None:
        self._place(repository, check_wanted(wanted))
        with self._told(repository, f"fetching manifest {wanted}"):
            return self._retry(lambda: self._manifest(repository, wanted))

    def _manifest(self, repository: str, wanted: str) -> tuple[Descriptor, bytes] | None:
        url = self._place(repository, f"manifests/{wanted}")
        ask = Ask(method="GET", url=url, scope=self._scope(repository), headers={"Accept": ACCEPT})
        try:
            with self._answer(ask) as response:
                data = read_some(response, MANIFEST_LIMIT)
                told = wanted if ":" in wanted else response.headers.get("Docker-Content-Digest", "")
        except RefusedError as error:
            if error.status == 404:
                return None
            raise
        digest = digest_of(data)
        if told.startswith("sha256:") and told != digest:
            raise TransientError(f"a manifest came that is {digest[:19]}, not {told[:19]}")
        try:
            media_type = media_type_of(json.loads(data))
        except MALFORMED:
            raise TransientError(f"what came for {wanted} is no manifest") from None
        return Descriptor(media_type=media_type, digest=digest, size=len(data)), data

    def put_manifest(self, repository: str, data: bytes, media_type: str, tag: str = "") -> Descriptor:
        """As Store has it, read back by digest and by tag.

        With a `tag`, the descriptor is of what the tag names once ours was put: where another writer was
        at the same tag just then, that may be theirs, and the caller decides what it means. Where the
        registry has no referrers API, a manifest with a `subject` is entered in the tag `sha256-<hex>`;
        writers who do that at the same moment can lose entries (distribution-spec, "Referrers Tag Schema").
        """
        wanted = check_wanted(tag or digest_of(data))
        try:
            value = json.loads(data)
            subject = check_digest(str(value["subject"]["digest"])) if value.get("subject") else ""
        except MALFORMED as error:
            raise RegistryError(f"{digest_of(data)} is no manifest: {error}") from error
        put = _Put(self, repository, data, media_type)
        put.url = self._place(repository, f"manifests/{wanted}")
        put.tag = tag
        with self._told(repository, f"putting manifest {wanted}"):
            found = self._retry(put.go)
        if subject and not put.listed:
            ours = Descriptor(media_type=media_type, digest=put.digest, size=len(data))
            self._attach(repository, value, ours)
        return found

    def _attach(self, repository: str, value: Mapping[str, Any], descriptor: Descriptor) -> None:
        subject = str(value["subject"]["digest"])
        entry: dict[str, object] = {
            **format_descriptor(descriptor),
            "artifactType": artifact_type(value),
            "annotations": value.get("annotations") or {},
        }
        with self._told(repository, f"listing what refers to {subject[:19]}"):
            if self._listed(repository, subject) is not None:
                return
        tag = subject.replace(":", "-")
        patience, there = self.options.patience, set[str]()
        with self._attaching:
            for attempt in range(patience.attempts + 1):
                rows = self._rows(repository, subject)
                if any(row["digest"] == descriptor.digest for row in rows):
                    return
                if attempt:
                    self.options.sleep(patience.wait(attempt, None, self.options.random))
                    rows = self._rows(repository, subject)
                # What was seen once is not asked for again: others write this list meanwhile.
                there |= self._present(repository, [row for row in rows if row["digest"] not in there])
                kept = [row for row in rows if row["digest"] in there - {descriptor.digest}]
                index = {"schemaVersion": 2, "mediaType": INDEX_TYPE, "manifests": [*kept, entry]}
                self.put_manifest(repository, canonical_json(index), INDEX_TYPE, tag)
        raise RegistryError(
            f"{self.host}/{repository}: other writers keep overwriting the list {tag}",
            hint="run it again when nobody else attaches to this image",
        )

    def delete_manifest(self, repository: str, digest: str) -> None:
        """Removes a manifest and the tags that name it; nothing happens when there is none."""
        self._delete(repository, check_digest(digest), hint=_DELETES_OFF)

    # --- tags and referrers ----------------------------------------------------------------------

    def tags(self, repository: str) -> tuple[str, ...]:
        url = self._place(repository, "tags/list?n=1000")
        with self._told(repository, "listing its tags"):
            found = [tag for page in self._pages(repository, url) for tag in page.get("tags") or ()]
        return tuple(sorted({tag for tag in found if isinstance(tag, str)}))

    def untag(self, repository: str, tag: str) -> None:
        """As Store has it. RegistryError also for a registry that cannot remove a tag by its name."""
        self._delete(repository, check_wanted(tag), hint=_UNTAG_OFF)

    def _delete(self, repository: str, wanted: str, *, hint: str) -> None:
        ask = Ask(
            method="DELETE",
            url=self._place(repository, f"manifests/{wanted}"),
            scope=self._scope(repository, "delete"),
        )

        def go() -> None:
            try:
                with self._answer(ask):
                    pass
            except RefusedError as error:
                if error.status == 404:
                    return
                # docker-registry 2.8 takes a tag for a damaged digest; others say 405, some 400.
                if error.status in (400, 405):
                    raise RegistryError(
                        f"{self.host}/{repository}: removing {wanted} is not possible: {error}", hint=hint
                    ) from error
                raise

        with self._told(repository, f"removing {wanted}"):
            self._retry(go)

    def referrers(self, repository: str, digest: str, artifact_type: str = "") -> tuple[Descriptor, ...]:
        """As Store has it: by the referrers API, else from the tag `sha256-<hex>`."""
        check_digest(digest)
        with self._told(repository, f"listing what refers to {digest[:19]}"):
            rows = self._listed(repository, digest)
        # The registry's own list leaves out what was deleted; of the tag only what is asked for is looked at.
        own = rows is not None
        rows = self._rows(repository, digest) if rows is None else rows
        found = [row for row in rows if artifact_type in ("", row.get("artifactType"))]
        if not own:
            there = self._present(repository, found)
            found = [row for row in found if row["digest"] in there]
        try:
            return tuple(parse_descriptor(row) for row in found)
        except MALFORMED as error:
            raise self._no_sense(repository, "a list of referrers") from error

    def _listed(self, repository: str, digest: str) -> list[Mapping[str, Any]] | None:
        """What the referrers API lists, None where there is none."""
        rows: list[Mapping[str, Any]] = []
        try:
            for page in self._pages(repository, self._place(repository, f"referrers/{digest}")):
                rows += page["manifests"] or ()
        except RefusedError as error:
            if error.status in (404, 405):
                return None
            raise
        except MALFORMED:
            return None  # a page for people in the place of an API
        return rows

    def _rows(self, repository: str, digest: str) -> list[Mapping[str, Any]]:
        """The tag `sha256-<hex>` as it stands: nobody takes a row out when its manifest is deleted."""
        found = self.manifest(repository, digest.replace(":", "-"))
        try:
            rows = list(json.loads(found[1])["manifests"] or ()) if found else []
            return [{**row, "digest": check_digest(str(row["digest"]))} for row in rows]
        except MALFORMED as error:
            raise self._no_sense(repository, "a list of referrers") from error

    def _present(self, repository: str, rows: Sequence[Mapping[str, Any]]) -> set[str]:
        digests = [str(row["digest"]) for row in rows]
        return {digest for digest in digests if self.manifest(repository, digest) is not None}

    def _pages(self, repository: str, url: str) -> Iterator[Mapping[str, Any]]:
        """The JSON of `url` and of the pages that its Link headers name; none for a 404 of tags."""
        seen: set[str] = set()
        while url and url not in seen:
            seen.add(url)
            page, url = self._retry(lambda url=url: self._page(repository, url))  # type: ignore[misc]
            yield page

    def _page(self, repository: str, url: str) -> tuple[Mapping[str, Any], str]:
        try:
            with self._answer(Ask(method="GET", url=url, scope=self._scope(repository))) as response:
                data = read_some(response, 4 * MANIFEST_LIMIT)
                link = re.search(r'<([^>]+)>\s*;[^,]*\brel="?next\b', response.headers.get("Link", ""))
                following = self._own(urljoin(url, link[1])) if link else ""
        except RefusedError as error:
            if error.status == 404 and "/tags/list" in url:
                return {}, ""
            raise
        try:
            value = json.loads(data)
        except (ValueError, RecursionError):
            raise TransientError("the answer is no JSON") from None
        if not isinstance(value, dict):
            raise RefusedError("the answer is no list")
        return value, following

    # --- names -----------------------------------------------------------------------------------

    def _path(self, repository: str) -> str:
        check_repository(repository)
        return f"library/{repository}" if self._hub and "/" not in repository else repository

    def _place(self, repository: str, rest: str) -> str:
        return f"{self._root}/v2/{self._path(repository)}/{rest}"

    def _scope(self, repository: str, actions: str = "pull") -> tuple[str, ...]:
        return (f"repository:{self._path(repository)}:{actions}",)

    def _own(self, url: str) -> str:
        """`url` with https where the registry is asked by https: proxies that end TLS often say http."""
        ours, theirs = urlsplit(self._root), urlsplit(url)
        if ours.scheme == "https" and theirs.scheme == "http" and ours.hostname == theirs.hostname:
            return theirs._replace(scheme="https", netloc=ours.netloc).geturl()
        return url

    def _location(self, response: requests.Response) -> str:
        place = response.headers.get("Location", "")
        return self._own(urljoin(response.url, place)) if place else ""

    # --- requests --------------------------------------------------------------------------------

    def _retry(self, call: Callable[[], T], *, progress: Callable[[], int] = lambda: 0) -> T:
        """`call()` until it raises no _TransientError; the last one comes through.

        What `progress` counts (bytes) makes the failures in a row begin anew whenever it grew.
        """
        patience, failures, refusals, seen = self.options.patience, 0, 0, progress()
        telling: TransientError | None = None

        def once() -> T:
            nonlocal failures, refusals, seen, telling
            try:
                return call()
            except TransientError as error:
                failures = 1 if progress() > seen else failures + 1
                refusals = min(refusals + 1, failures) if error.status == 401 else 0
                seen = max(seen, progress())
                if error.status:
                    telling = error
                raise

        def wait(state: tenacity.RetryCallState) -> float:
            error = state.outcome.exception() if state.outcome else None
            return patience.wait(failures, getattr(error, "after", None), self.options.random)

        def stop(_: tenacity.RetryCallState) -> bool:
            # Tokens made a moment ago and refused again and again: rarely a fault, mostly a missing right.
            return failures >= patience.attempts or refusals >= REFUSALS

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
    def _answer(self, ask: Ask) -> Iterator[requests.Response]:
        """One request, its body not yet read. Raises _TransientError or _RefusedError, also from the body."""
        with self._faults():
            response = self._request(ask)
            try:
                if response.raw.length_remaining == 0:
                    response.raw.read()  # closed unread, it would take its connection along
                yield response
            finally:
                response.close()

    def _request(self, ask: Ask) -> requests.Response:
        """As `_answer`, for who closes the response and minds the faults of its body."""
        with self._faults():
            signed = self._authorization(ask.scope) if self._is_ours(ask.url) else ""
            response = self._send(ask, signed)
            if response.status_code == 401 and self._is_ours(ask.url):
                again = self._renew(ask, response, signed)
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

    def _send(self, ask: Ask, authorization: str) -> requests.Response:
        patience = self.options.patience
        return self._session().request(
            ask.method,
            ask.url,
            headers=dict(ask.headers),
            data=ask.body() if callable(ask.body) else ask.body,
            auth=Signature(authorization),
            stream=True,
            allow_redirects=ask.method in ("GET", "HEAD"),
            timeout=(patience.connect, patience.commit if ask.patient else patience.read),
            # Given with each request: a session's own `verify` loses against REQUESTS_CA_BUNDLE.
            verify=str(self.options.certificates or "") or True,
        )

    def _session(self) -> requests.Session:
        session: requests.Session | None = getattr(self._local, "session", None)
        if session is None:
            session = Connection()
            session.headers.update({"Accept-Encoding": "identity", "User-Agent": "imagefactory"})
            session.trust_env = not self._here  # no proxy stands between this machine and itself
            self._local.session = session
            with self._lock:
                self._sessions.add(session)
        return session

    def _is_ours(self, url: str) -> bool:
        """Whether a credential may go there: the registry's own scheme, host and port."""
        return origin_of(url) == origin_of(self._root)

    @contextmanager
    def _faults(self) -> Iterator[None]:
        """Turns what requests and urllib3 raise into the two errors of this file."""
        try:
            yield
        except (requests.exceptions.SSLError, urllib3.exceptions.SSLError) as error:
            text = self._clean(reason_of(error))
            if any(word in text for word in TLS_FOR_GOOD):
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

    def _error(self, response: requests.Response) -> TransientError | RefusedError:
        """What an answer that is no success says, in the registry's own words."""
        status, code, words = response.status_code, "", ""
        with suppress(requests.exceptions.RequestException, urllib3.exceptions.HTTPError, OSError):
            data = response.raw.read(1 << 16, decode_content=False)
            code, words = parse_error(data)
        response.close()
        text = self._clean(f"{status} {code} {words}")
        if status in (408, 425, 429) or (status >= 500 and status != 501):
            return TransientError(text, after=retry_after(response.headers), status=status)
        return RefusedError(text, status=status, code=code)

    # --- who asks --------------------------------------------------------------------------------

    def _authorization(self, scope: tuple[str, ...]) -> str:
        """The Authorization for `scope`, as far as the registry has said what it wants; else empty."""
        with self._lock:
            if self._basic:
                return self._login().basic
            if self._challenge is None:
                return ""
            token = self._tokens.get(scope)
            if token is None or self.options.clock() >= token.until:
                token = self._tokens[scope] = self._fetch_token(self._challenge, scope)
            return f"Bearer {token.value}"

    def _renew(self, ask: Ask, response: requests.Response, refused: str) -> str:
        """The Authorization to try after a 401. Raises _RefusedError where there is none."""
        header = response.headers.get("WWW-Authenticate", "")
        challenge = parse_challenge(header)
        with self._lock:
            if challenge is None:
                if refused.startswith("Basic") or (header and not re.search(r"(?i)\bbasic\b", header)):
                    raise self._error(response)
                if self._find() is None:
                    raise self._error(response)
                self._basic = True
                return self._login().basic
            if challenge.error == "insufficient_scope" and refused and not challenge.scope:
                raise self._error(response)
            self._challenge, self._basic = challenge, False
            held = self._tokens.get(ask.scope)
            if held is None or f"Bearer {held.value}" == refused or challenge.scope:
                # Another thread may have brought a new one meanwhile: then that is tried first.
                if held is not None and f"Bearer {held.value}" != refused:
                    return f"Bearer {held.value}"
                wanted = challenge.scope or ask.scope
                held = self._tokens[ask.scope] = self._fetch_token(challenge, wanted)
            return f"Bearer {held.value}"

    def _fetch_token(self, challenge: Challenge, scope: tuple[str, ...]) -> Token:
        """A token by the docker token specification; by OAuth2 where an identity token is kept."""
        if urlsplit(challenge.realm).scheme != "https" and not self._root.startswith("http:"):
            raise RefusedError(f"it sends for a token to {host_of(challenge.realm)} without https")
        credential = self._find()
        fields = [("service", challenge.service), *(("scope", word) for word in scope)]
        ask = Ask(
            method="GET",
            url=f"{challenge.realm}{'&' if '?' in challenge.realm else '?'}{urlencode(fields)}",
            scope=(),
        )
        signed = credential.basic if credential and credential.user else ""
        if credential and not credential.user:
            form = {"grant_type": "refresh_token", "client_id": "imagefactory", "service": challenge.service}
            form |= {"scope": " ".join(scope), "refresh_token": credential.secret}
            ask = Ask(
                method="POST",
                url=challenge.realm,
                scope=(),
                headers={"Content-Type": "application/x-www-form-urlencoded"},
                body=urlencode(form).encode(),
            )
        with self._faults():
            response = self._send(ask, signed)
            try:
                if response.status_code != 200:
                    error = self._error(response)
                    where = f"no token from {host_of(challenge.realm)}: {error}"
                    if isinstance(error, TransientError):
                        raise TransientError(where, after=error.after, status=error.status)
                    raise RefusedError(where, status=401 if error.status == 401 else 403)
                data = read_some(response, 1 << 20)
            finally:
                response.close()
        try:
            value = json.loads(data)
            token = str(value.get("token") or value["access_token"])
            seconds = float(value.get("expires_in") or 60)  # what the specification says where it is silent
        except MALFORMED:
            raise TransientError(f"no token came from {host_of(challenge.realm)}") from None
        self._secrets.add(token)
        # Early enough that a request does not run out on its way.
        return Token(value=token, until=self.options.clock() + seconds - min(10.0, seconds / 4))

    def _find(self) -> Credential | None:
        if not self._looked_up:
            self._credential, self._looked_up = self.options.credentials(self.host), True
            if self._credential:
                self._secrets |= {self._credential.secret, self._credential.basic.partition(" ")[2]}
        return self._credential

    def _login(self) -> Credential:
        found = self._find()
        if found is None or not found.user:
            raise RefusedError("it wants a user and a password", status=401)
        return found

    # --- errors ----------------------------------------------------------------------------------

    def _clean(self, text: str) -> str:
        """One printable line of a fair length, without secrets and without the queries of addresses."""
        for secret in sorted(self._secrets, key=len, reverse=True):
            text = text.replace(secret, "***")
        text = re.sub(r"(/[^\s?#)]*)\?[^\s)'\"]*", r"\1", re.sub(r"(?<=://)[^\s/]*@", "", text))
        text = " ".join("".join(c if c.isprintable() else " " for c in text).split())
        return text if len(text) <= 300 else f"{text[:300]} ..."

    @contextmanager
    def _told(self, repository: str, doing: str) -> Iterator[None]:
        """Turns the two errors of this file into a RegistryError that says what, where and what to do."""
        try:
            yield
        except (TransientError, RefusedError) as error:
            raise RegistryError(
                f"{self.host}/{repository}: {doing}: {error}", hint=self._hint(error, repository)
            ) from None

    def _hint(self, error: TransientError | RefusedError, repository: str) -> str:
        status, text = error.status, str(error)
        if status == 401:
            found = self._credential
            known = f"the credentials from {found.origin or 'the settings'} were refused; " if found else ""
            return f"{known}log in: docker login {self.host}"
        if status == 403:
            return f"may this account do that in {repository}? log in as another: docker login {self.host}"
        for word, hint in HINTS:
            if word.lower() in text.lower():
                return hint.format(host=self.host)
        if status == 429:
            return "it limits how often it may be asked: wait, or log in"
        if isinstance(error, TransientError):
            return "run the same command again: what arrived is not sent again"
        return ""

    def _no_sense(self, repository: str, what: str) -> RegistryError:
        return RegistryError(
            f"{self.host}/{repository}: what came is not {what}", hint=f"is {self.host} a registry?"
        )


_DELETES_OFF = "deletion is switched off there (docker-registry: REGISTRY_STORAGE_DELETE_ENABLED=true)"
_UNTAG_OFF = "it removes no tag by its name: remove the manifest, or point the tag to another image"


class _Body:
    """Bytes of a blob from an offset on, `size` of them, as requests sends them: with a Content-Length."""

    def __init__(self, upload: _Upload, size: int) -> None:
        self.upload, self.size = upload, size

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Iterator[bytes]:
        descriptor, left = self.upload.descriptor, self.size
        last = self.upload.offset + self.size == descriptor.size
        for data in self.upload.source(self.upload.offset):
            if last and len(data) > left:
                raise StoreError(f"more came for blob {descriptor.digest} than its {descriptor.size} bytes")
            part = data[:left]
            left -= len(part)
            self.upload.sent += len(part)
            if part:
                yield part
            if not left and not last:
                return
        if left:
            raise StoreError(f"what came for blob {descriptor.digest} ended {left} bytes too early")


class _Upload:
    """One blob on its way in: `go` until it returns. `offset` is what the registry has confirmed."""

    def __init__(self, registry: Registry, repository: str, descriptor: Descriptor, source: Source) -> None:
        self.registry, self.repository = registry, repository
        self.descriptor, self.source = descriptor, source
        self.scope = registry._scope(repository, "pull,push")
        self.place = registry._place(repository, f"blobs/{descriptor.digest}")
        self.url = ""
        self.offset = self.sent = 0
        self.piece = registry.options.piece
        self.broken = self.closing = False

    def go(self) -> None:
        """Begins or goes on. Raises _TransientError where it is to be called again."""
        if self.closing:  # the end of the upload was asked for, and no answer came
            if self._arrived():
                return
            self.closing = False
        if self.url and self.broken:
            self._resume()
        if not self.url:
            self._begin()
        self.broken = True
        try:
            self._send()
        except RefusedError as error:
            if error.status != 404 and error.code not in LOST:
                raise
            if error.code == "DIGEST_INVALID":
                self._check_source()
            self.url, self.closing = "", False
            raise TransientError(f"the upload was lost: {error}", after=0.0) from None
        if not self._arrived():
            raise TransientError("the registry took the blob and does not have it")

    def _arrived(self) -> bool:
        return self.registry._has(self.repository, self.place, self.descriptor)

    def _begin(self) -> None:
        url = self.registry._place(self.repository, "blobs/uploads/")
        with self.registry._answer(Ask(method="POST", url=url, scope=self.scope)) as response:
            self._note(response)
            least = response.headers.get("OCI-Chunk-Min-Length", "")
        if self.piece and least.isdigit():
            self.piece = max(self.piece, int(least))
        self.offset = 0
        if not self.url:
            raise RefusedError("it gave no address for the upload")

    def _note(self, response: requests.Response) -> None:
        self.url = self.registry._location(response) or self.url

    def _resume(self) -> None:
        """Asks how much arrived. On any doubt the upload begins anew."""
        try:
            with self.registry._answer(Ask(method="GET", url=self.url, scope=self.scope)) as response:
                self._note(response)
                end = range_end(response.headers)
        except RefusedError:
            self.url = ""
            return
        if end is None or end < 1 or end >= self.descriptor.size:  # 0-0 may be one byte or none
            self.cancel()
            return
        self.offset = end + 1

    def _send(self) -> None:
        left = self.descriptor.size - self.offset
        if self.offset == 0 and left <= SMALL and not self.piece:
            self._close(_Body(self, left) if left else None)
            return
        while self.offset < self.descriptor.size:
            self._patch()
        self._close(None)

    def _patch(self) -> None:
        left = self.descriptor.size - self.offset
        size = min(self.piece, left) if self.piece else left
        end = self.offset + size
        headers = {"Content-Type": BINARY}
        if size < self.descriptor.size:
            headers["Content-Range"] = f"{self.offset}-{end - 1}"
        ask = Ask(
            method="PATCH",
            url=self.url,
            scope=self.scope,
            headers=headers,
            body=lambda: _Body(self, size),
            patient=True,
        )
        with self.registry._answer(ask) as response:
            self._note(response)
            told = range_end(response.headers)
        if told is not None and told != end - 1:
            raise TransientError(f"{told + 1} of {end} bytes arrived")
        self.offset = end

    def _close(self, body: _Body | None) -> None:
        self.closing = True
        query = urlencode({"digest": self.descriptor.digest})
        ask = Ask(
            method="PUT",
            url=f"{self.url}{'&' if '?' in self.url else '?'}{query}",
            scope=self.scope,
            headers={"Content-Type": BINARY},
            body=(lambda: body) if body else b"",
            patient=True,
        )
        with self.registry._answer(ask) as response:
            told = response.headers.get("Docker-Content-Digest", "")
        if told.startswith("sha256:") and told != self.descriptor.digest:
            raise RefusedError(f"it took another blob than was sent: {told[:80]}")

    def _check_source(self) -> None:
        sha256 = hashlib.sha256()
        for data in self.source(0):
            sha256.update(data)
        if f"sha256:{sha256.hexdigest()}" != self.descriptor.digest:
            raise StoreError(
                f"blob {self.descriptor.digest} is damaged: it cannot be sent",
                hint="build it again: `imagefactory build TARGET` makes what is missing",
            )

    def cancel(self) -> None:
        self.registry._forget(self.repository, self.url)
        self.url = ""


class _Put:
    """One manifest on its way in: `go` until it returns. `listed`: the registry lists it as a referrer."""

    def __init__(self, registry: Registry, repository: str, data: bytes, media_type: str) -> None:
        self.registry, self.repository, self.data, self.media_type = registry, repository, data, media_type
        self.digest = digest_of(data)
        self.url = self.tag = ""
        self.tried = self.listed = False

    def go(self) -> Descriptor:
        registry, repository = self.registry, self.repository
        if self.tried:  # the last one may have arrived: then nothing is put again over what came later
            found = registry._manifest(repository, self.tag or self.digest)
            if found is not None and found[0].digest == self.digest:
                return found[0]
        self.tried = True
        ask = Ask(
            method="PUT",
            url=self.url,
            scope=registry._scope(repository, "pull,push"),
            headers={"Content-Type": self.media_type},
            body=self.data,
            patient=True,
        )
        with registry._answer(ask) as response:
            told = response.headers.get("Docker-Content-Digest", "")
            self.listed = bool(response.headers.get("OCI-Subject"))
        if told.startswith("sha256:") and told != self.digest:
            raise RefusedError(f"it took another manifest than was sent: {told[:80]}")
        found = registry._manifest(repository, self.digest)
        if found is None or found[1] != self.data:
            raise TransientError("the registry took the manifest and does not give it back")
        if self.tag:
            found = registry._manifest(repository, self.tag)
            if found is None:
                raise TransientError("the registry took the manifest and does not know its tag")
        return found[0]


class _Reader:
    """One blob on its way out; `next` gives the following bytes, b"" at the end."""

    def __init__(self, registry: Registry, repository: str, place: str, descriptor: Descriptor) -> None:
        self.registry, self.repository, self.place = registry, repository, place
        self.descriptor, self.position = descriptor, 0
        self.response: requests.Response | None = None
        self.chunks: Iterator[bytes] = iter(())

    def close(self) -> None:
        if self.response is not None:
            self.response.close()
        self.response = None

    def whole(self) -> bytes:
        self.position = 0
        data = b"".join(iter(self.next, b""))
        self.close()
        if digest_of(data) != self.descriptor.digest:
            raise TransientError("the bytes are not what the digest says")
        return data

    def next(self) -> bytes:
        left = self.descriptor.size - self.position
        try:
            with self.registry._faults():
                if left and self.response is None:
                    self._open()
                data = next(self.chunks, b"")
        except TransientError:
            self.close()
            raise
        if len(data) > left:
            self.close()
            raise RefusedError(f"more than {self.descriptor.size} bytes came")
        if left and not data:
            self.close()
            raise TransientError(f"{self.position} of {self.descriptor.size} bytes came")
        self.position += len(data)
        return data

    def _open(self) -> None:
        headers = {"Range": f"bytes={self.position}-"} if self.position else {}
        ask = Ask(method="GET", url=self.place, scope=self.registry._scope(self.repository), headers=headers)
        self.response = self.registry._request(ask)
        self.chunks = self.response.raw.stream(CHUNK, decode_content=False)
        skip = self.position
        if self.response.status_code == 206:
            came = re.match(r"bytes (\d+)-", self.response.headers.get("Content-Range", ""))
            if not came or int(came[1]) != self.position:
                raise TransientError("other bytes came than were asked for")
            skip = 0
        if skip:
            self.chunks = skip_bytes(self.chunks, skip)


# --- answers -------------------------------------------------------------------------------------
