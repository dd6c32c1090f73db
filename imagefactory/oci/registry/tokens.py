"""Who asks a registry: credentials, and the tokens that it wants for them.

Sources: RFC 6750; docker/distribution's token specification, OAuth2 where an identity token is kept.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from urllib.parse import urlsplit


@dataclass(frozen=True, slots=True, kw_only=True)
class Token:
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
    found = re.search(r'(?i)\bBearer\s+((?:[a-z_]+\s*=\s*(?:"[^"]*"|[^\s,"]+)\s*(?:,\s*|$))+)', header)
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
