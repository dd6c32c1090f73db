"""One exchange with a registry: what is asked, how long faults are borne, and what faults an answer tells."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from urllib.parse import urlsplit

from imagefactory.oci.credentials import Credentials, anonymous
from imagefactory.oci.manifests import MALFORMED
from imagefactory.oci.model import Descriptor
from imagefactory.progress import QUIET, format_bytes
from imagefactory.http import Patience

_PATIENCE = Patience(first_wait=0.5, longest_wait=30.0, read=60.0)
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
    patience: Patience = _PATIENCE
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
class Ask:
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
