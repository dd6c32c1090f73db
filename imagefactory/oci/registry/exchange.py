"""One exchange with a registry: what is asked, how long faults are borne, and what faults an answer tells."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from pathlib import Path
from random import Random
from urllib.parse import urlsplit

from imagefactory.oci.credentials import Credentials, anonymous
from imagefactory.oci.model import Descriptor
from imagefactory.progress import format_bytes

CHUNK = 1 << 16  # what a connection that breaks may cost: what came of a chunk is lost
SMALL = 1 << 20  # a blob of up to this size goes with the closing PUT: one request less


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """How long faults are borne.

    `attempts` in a row may fail without one new byte. The wait between them begins at about `first_wait`
    seconds, doubles, is jittered and never longer than `longest_wait`, which also caps Retry-After.
    `connect`, `read` and `commit` are time-outs in seconds; a registry may hash a whole blob before it
    answers the request that ends its upload.
    """

    attempts: int = 6
    first_wait: float = 0.5
    longest_wait: float = 30.0
    connect: float = 15.0
    read: float = 60.0
    commit: float = 300.0

    def wait(self, failures: int, after: float | None, random: Random) -> float:
        """Seconds to wait after the `failures`-th failure in a row (from 1)."""
        backoff = self.first_wait * 2.0 ** (failures - 1) * random.uniform(0.5, 1.0)
        return min(max(backoff, after or 0.0), self.longest_wait)


@dataclass(frozen=True, slots=True, kw_only=True)
class RegistryOptions:
    """How a registry is reached.

    `certificates` is a file or folder of CA certificates (None: those of the libraries). `plain_hosts`
    (`host` or `host:port`) are asked by http, and so are this machine's own addresses unless
    `loopback_plain` is off; all others by https. `piece` is how many bytes of a blob one request
    carries, 0 for all that are left: docker's way, which all registries take.
    """

    credentials: Credentials = anonymous
    certificates: Path | None = None
    plain_hosts: Collection[str] = ()
    loopback_plain: bool = True
    patience: Patience = field(default_factory=Patience)
    piece: int = 0
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    random: Random = field(default_factory=Random)


class TransientError(Exception):
    """A fault that may be gone the next time; `after` is the registry's Retry-After in seconds, or None."""

    def __init__(self, message: str, *, after: float | None = None, status: int = 0) -> None:
        super().__init__(message)
        self.after, self.status = after, status


class RefusedError(Exception):
    """An answer that asking again will not change. `status` is HTTP's, 0 if there was none."""

    def __init__(self, message: str, *, status: int = 0, code: str = "") -> None:
        super().__init__(message)
        self.status, self.code = status, code


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One request. `scope` is what a token must allow; `body` is made anew each time it is sent."""

    method: str
    url: str
    scope: tuple[str, ...]
    headers: Mapping[str, str] = field(default_factory=dict)
    body: Callable[[], Iterable[bytes]] | bytes = b""
    patient: bool = False


MALFORMED = (KeyError, IndexError, TypeError, AttributeError, ValueError, RecursionError, OverflowError)


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


def reason_of(error: BaseException) -> str:
    """The innermost reason of a requests error, in words; the outer ones repeat it with addresses."""
    while True:
        inner = getattr(error, "reason", None)
        if not isinstance(inner, BaseException):
            inner = next((word for word in reversed(error.args) if isinstance(word, BaseException)), None)
        if inner is None:
            text = str(error) or type(error).__name__
            return re.sub(r"^<?\S+ object at 0x\w+>?: |^\S+\(host=.*?\): ", "", text)
        error = inner


def origin_of(url: str) -> tuple[str, str, int]:
    parts = urlsplit(url)
    return parts.scheme, parts.hostname or "", parts.port or {"http": 80, "https": 443}.get(parts.scheme, 0)


def host_of(url: str) -> str:
    return urlsplit(url).hostname or "nowhere"


def short_of(descriptor: Descriptor) -> str:
    return f"{descriptor.digest[7:19]} ({format_bytes(descriptor.size)})"
