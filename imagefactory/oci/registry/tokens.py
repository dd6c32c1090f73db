"""Who asks a registry: credentials, and the tokens that it wants for them.

Sources: RFC 6750; docker/distribution's token specification, OAuth2 where an identity token is kept.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from urllib.parse import urlencode, urlsplit

from imagefactory.oci.credentials import Credential
from imagefactory.oci.manifests import MALFORMED
from imagefactory.oci.registry.exchange import Ask, RegistryOptions, host_of, may_be_plain
from imagefactory.http import RefusedError, TransientError

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
class Challenge:
    """What a Bearer challenge asks for."""

    realm: str
    service: str
    scope: tuple[str, ...]
    error: str


def parse_challenge(header: str) -> Challenge | None:
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
    return Challenge(
        realm=realm,
        service=words.get("service", ""),
        scope=tuple(words.get("scope", "").split()),
        error=words.get("error", ""),
    )


class Tokens:
    """What one registry takes as proof of who asks: a password, or tokens that it gives for one.

    `fetch` asks, with an Authorization, and gives the body of a 200. Safe to use from several threads.
    """

    def __init__(
        self, host: str, options: RegistryOptions, *, plain: bool, fetch: Callable[[Ask, str], bytes]
    ) -> None:
        self._host, self._plain, self._fetch, self._options = host, plain, fetch, options
        self._credentials, self._clock, self._tell = options.credentials, options.clock, options.tell
        self._lock = threading.RLock()
        self.credential: Credential | None = None
        self.secrets: set[str] = set()
        self._looked_up = False
        self._basic = False
        self._challenge: Challenge | None = None
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

        `refused` is what was tried. Raises RefusedError where a user is wanted, or a token is not given.
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

    def _fetch_token(self, challenge: Challenge, scope: tuple[str, ...]) -> _Token:
        """A token by the docker token specification; by OAuth2 where an identity token is kept."""
        realm = urlsplit(challenge.realm)
        own = realm.netloc == self._host or may_be_plain(realm.netloc, self._options)
        if realm.scheme != "https" and not (self._plain and own):
            raise RefusedError(f"it requests a token from {host_of(challenge.realm)} without https")
        credential = self._find()
        if credential:
            self._tell_of(host_of(challenge.realm), credential)
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
        where = f"no token from {host_of(challenge.realm)}"
        try:
            data = self._fetch(ask, signed)
        except TransientError as error:
            if not error.status:
                raise
            raise TransientError(f"{where}: {error}", after=error.after, status=error.status) from None
        except RefusedError as error:
            if not error.status:
                raise
            raise RefusedError(f"{where}: {error}", status=401 if error.status == 401 else 403) from None
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
            raise RefusedError("it requires a user and a password", status=401)
        return found
