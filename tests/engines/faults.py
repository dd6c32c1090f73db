"""A network that does its worst: a proxy between a client and a registry, with seeded faults.

`FaultProxy(upstream)` listens on 127.0.0.1 and relays HTTP/1.1 byte by byte. A `Storm` decides, request by
request, which fault comes; each fault that was really injected is counted. With `tokens` the proxy is
also the registry's door: it wants bearer tokens, hands them out at /token, and can let them expire.

A client with several threads may say by the header LINE what a request is about. Requests of one line come
one after the other, so what a storm does to them does not depend on which thread runs when.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import random
import socket
import struct
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from types import TracebackType


class Fault(StrEnum):
    TOO_MANY = "429"
    TOO_MANY_WAIT = "429, Retry-After"
    ERROR_500 = "500"
    ERROR_502 = "502"
    ERROR_503 = "503"
    ERROR_504 = "504"
    RESET_BEFORE = "reset before the registry saw it"
    RESET_IN_BODY = "reset in the middle of the body"
    RESET_AFTER = "reset after the registry did it"
    ERROR_AFTER = "502 after the registry did it"
    SLOW = "slow reply"
    TRUNCATED = "truncated reply"
    EXPIRED = "token expired"
    LOST_SESSION = "upload session lost"


STATUS = {
    Fault.TOO_MANY: 429,
    Fault.TOO_MANY_WAIT: 429,
    Fault.ERROR_500: 500,
    Fault.ERROR_502: 502,
    Fault.ERROR_503: 503,
    Fault.ERROR_504: 504,
    Fault.ERROR_AFTER: 502,
}
RARE = (Fault.EXPIRED, Fault.LOST_SESSION, Fault.RESET_IN_BODY)  # they fit few requests
REASONS = {401: "Unauthorized", 404: "Not Found", 429: "Too Many Requests", 200: "OK"}
SLOW_SECONDS = 0.03
LINE = "X-Faults-Line"
STUCK = 300
"""Seconds after which something that is waited for does not come."""


@dataclass(frozen=True)
class Request:
    method: str
    path: str
    headers: dict[str, str]
    raw: bytes

    @property
    def length(self) -> int:
        return int(self.headers.get("content-length", "0"))

    @property
    def chunked(self) -> bool:
        return self.headers.get("transfer-encoding", "").lower() == "chunked"

    @property
    def has_body(self) -> bool:
        return self.chunked or self.length > 0

    @property
    def line(self) -> str:
        return self.headers.get(LINE.lower(), "")

    @property
    def token(self) -> str:
        return self.headers.get("authorization", "").removeprefix("Bearer ")

    @property
    def session(self) -> bool:
        """Whether it speaks to an upload session that the registry opened before."""
        path = self.path.partition("?")[0]
        return "/blobs/uploads/" in path and not path.endswith("/uploads/")


class Storm:
    """At most `budget` faults, each request hit with chance `rate`; `hits` has those that came, by line.

    Each of the `lines` has dice and a share of the budget of its own. No fault comes in others: their
    requests are late ones, of a client that was stopped before.
    """

    def __init__(
        self,
        seed: int,
        *,
        budget: int,
        rate: float,
        kinds: tuple[Fault, ...] = tuple(Fault),
        lines: Sequence[str] = ("",),
    ) -> None:
        self.rate, self.kinds = rate, kinds
        self.left = Counter(random.Random(seed).choices(lines, k=budget))
        self.dice = {line: random.Random(f"{seed} {line}") for line in lines}
        self.hits: dict[str, list[Fault]] = {line: [] for line in lines}

    @property
    def faults(self) -> Counter[Fault]:
        return Counter(fault for hits in self.hits.values() for fault in hits)

    @property
    def worst(self) -> int:
        """How many faults came in the line that met most of them."""
        return max(map(len, self.hits.values()))

    def pick(self, request: Request, *, tokens: bool) -> Fault | None:
        line = request.line
        if line not in self.dice or (line and request.path.startswith("/token")):
            return None  # which thread asks for the token of all is chance
        fits = [kind for kind in self.kinds if _fits(kind, request, tokens=tokens)]
        fits += 3 * [kind for kind in fits if kind in RARE]
        if not fits or not self.left[line] or self.dice[line].random() >= self.rate:
            return None
        self.left[line] -= 1
        self.hits[line].append(self.dice[line].choice(fits))
        return self.hits[line][-1]


def _fits(kind: Fault, request: Request, *, tokens: bool) -> bool:
    if kind is Fault.EXPIRED:
        return tokens and "authorization" in request.headers and request.path.startswith("/v2/")
    if kind is Fault.LOST_SESSION:
        return request.session and request.method in ("PATCH", "PUT", "GET")
    if kind is Fault.RESET_IN_BODY:
        return request.length > 1
    return True


CALM = Storm(0, budget=0, rate=0.0)


@dataclass
class Seen:
    """What went through: faults by kind, requests by method, and bytes of request bodies sent on."""

    faults: Counter[Fault] = field(default_factory=Counter)
    requests: Counter[str] = field(default_factory=Counter)
    body_bytes: int = 0
    mounts: int = 0


class FaultProxy:
    """`with FaultProxy("127.0.0.1:5000") as proxy: ... proxy.address`. `storm` may be set at any time.

    With `most_bytes` no more of request bodies goes on than so much, until it is set anew. `serving` counts
    open connections.
    """

    def __init__(self, upstream: str, *, tokens: bool = False) -> None:
        host, _, port = upstream.rpartition(":")
        self.upstream = (host, int(port))
        self.tokens = tokens
        self.storm: Storm = CALM
        self.most_bytes = 0
        self.retry_after = 1
        self.seen = Seen()
        self.address = ""
        self.serving = 0
        self._tokens: set[str] = set()
        self._expired: set[tuple[str, str]] = set()  # line and token
        self._numbers = itertools.count(1)
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="fault-proxy")

    def __enter__(self) -> FaultProxy:
        self._thread.start()
        assert self._ready.wait(STUCK)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        listening = asyncio.start_server(self._serve, "127.0.0.1", 0, limit=1 << 18)
        server = self._loop.run_until_complete(listening)
        self.address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        self._ready.set()
        self._loop.run_forever()
        server.close()
        for task in asyncio.all_tasks(self._loop):
            task.cancel()
        self._loop.run_until_complete(asyncio.sleep(0))
        self._loop.close()

    # --- one client ------------------------------------------------------------------------------

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        upstream = _Upstream(self.upstream)
        self.serving += 1
        try:
            while True:
                request = _parse(await reader.readuntil(b"\r\n\r\n"))
                if not await self._answer(request, reader, writer, upstream):
                    break
        except (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, asyncio.CancelledError):
            pass
        finally:
            upstream.close()
            writer.close()
            self.serving -= 1

    async def _answer(
        self,
        request: Request,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        upstream: _Upstream,
    ) -> bool:
        """One request; whether the connection can take another."""
        self.seen.requests[request.method] += 1
        self.seen.mounts += "mount=" in request.path
        fault = self.storm.pick(request, tokens=self.tokens)
        if fault is not None:
            self.seen.faults[fault] += 1
        if fault is Fault.RESET_BEFORE:
            return _reset(writer)
        if fault is Fault.EXPIRED:
            self._expired.add((request.line, request.token))
        if fault is Fault.LOST_SESSION:
            await _drain(request, reader)
            await upstream.drop_session(request)
            return await _say(writer, 404, _error("BLOB_UPLOAD_UNKNOWN"))
        if fault in STATUS and fault is not Fault.ERROR_AFTER:
            await _drain(request, reader)
            extra = ""
            if fault is Fault.TOO_MANY_WAIT:
                extra = f"Retry-After: {self.retry_after}\r\n"
            return await _say(writer, STATUS[fault], _error("TOOMANYREQUESTS"), extra)
        if self.tokens and (reply := self._door(request)) is not None:
            await _drain(request, reader)
            status, body, extra = reply
            return await _say(writer, status, body, extra)
        if fault is Fault.RESET_IN_BODY:
            await upstream.open()
            upstream.send(request.raw + await reader.readexactly(request.length // 2))
            await upstream.hang_up()
            return _reset(writer)
        head, body = await self._relay(request, reader, upstream)
        if fault is Fault.RESET_AFTER:
            return _reset(writer)
        if fault is Fault.ERROR_AFTER:
            return await _say(writer, 502, _error("UNKNOWN"))
        if fault is Fault.TRUNCATED:
            whole = head + body
            writer.write(whole[: len(head) + len(body) // 2] if body else whole[: len(whole) // 2])
            with contextlib.suppress(ConnectionError):
                await writer.drain()
            return False
        if fault is Fault.SLOW:
            for part in (head[: len(head) // 2], head[len(head) // 2 :], body):
                await asyncio.sleep(SLOW_SECONDS / 3)
                writer.write(part)
        else:
            writer.write(head + body)
        await writer.drain()
        return b"\r\nconnection: close" not in head.lower()

    def _door(self, request: Request) -> tuple[int, bytes, str] | None:
        """The token server and who is let through; None for a request that may pass."""
        if request.path.startswith("/token"):
            token = f"token-{next(self._numbers)}"
            self._tokens.add(token)
            return 200, json.dumps({"token": token, "expires_in": 300}).encode(), ""
        if request.token in self._tokens and (request.line, request.token) not in self._expired:
            return None
        challenge = f'Bearer realm="http://{self.address}/token",service="faults"'
        return 401, _error("UNAUTHORIZED"), f"WWW-Authenticate: {challenge}\r\n"

    async def _relay(
        self, request: Request, reader: asyncio.StreamReader, upstream: _Upstream
    ) -> tuple[bytes, bytes]:
        await upstream.open()
        upstream.send(request.raw)
        async for piece in _body(request, reader):
            upstream.send(piece)
            self.seen.body_bytes += len(piece)
            while 0 < self.most_bytes <= self.seen.body_bytes:
                await asyncio.sleep(0.01)
        await upstream.flush()
        return await upstream.reply(request.method)


class _Upstream:
    """One connection to the registry, opened when it is needed."""

    def __init__(self, address: tuple[str, int]) -> None:
        self.address = address
        self.streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def open(self) -> None:
        if self.streams is None or self.streams[0].at_eof():
            self.close()
            self.streams = await asyncio.open_connection(*self.address, limit=1 << 18)

    def send(self, data: bytes) -> None:
        assert self.streams is not None
        if not self.streams[1].is_closing():  # a registry that has refused reads no further
            self.streams[1].write(data)

    async def flush(self) -> None:
        assert self.streams is not None
        await self.streams[1].drain()

    async def reply(self, method: str) -> tuple[bytes, bytes]:
        assert self.streams is not None
        reader = self.streams[0]
        head = await reader.readuntil(b"\r\n\r\n")
        status = int(head[9:12])
        headers = _headers(head)
        if method == "HEAD" or status in (204, 304):
            body = b""
        elif headers.get("transfer-encoding", "").lower() == "chunked":
            body = b"".join([piece async for piece in _chunks(reader)])
        elif "content-length" in headers:
            body = await reader.readexactly(int(headers["content-length"]))
        else:
            body = await reader.read()
        if headers.get("connection", "").lower() == "close":
            self.close()
        return head, body

    async def drop_session(self, request: Request) -> None:
        """The registry forgets the upload that the request speaks to."""
        await self.open()
        host = request.headers["host"]
        self.send(f"DELETE {request.path} HTTP/1.1\r\nHost: {host}\r\nContent-Length: 0\r\n\r\n".encode())
        await self.flush()
        await self.reply("DELETE")

    async def hang_up(self) -> None:
        """Ends in the middle of a body. Returns when the registry is done with what came of it."""
        assert self.streams is not None
        reader, writer = self.streams
        with contextlib.suppress(ConnectionError):
            await writer.drain()
            writer.write_eof()
            async with asyncio.timeout(STUCK):
                await reader.read()
        self.close()

    def close(self) -> None:
        if self.streams is not None:
            self.streams[1].close()
            self.streams = None


# --- HTTP, as little as is needed ----------------------------------------------------------------


def _parse(raw: bytes) -> Request:
    method, path, _ = raw.split(b"\r\n", 1)[0].decode("latin-1").split(" ", 2)
    return Request(method=method, path=path, headers=_headers(raw), raw=raw)


def _headers(raw: bytes) -> dict[str, str]:
    lines = raw.decode("latin-1").split("\r\n")[1:]
    pairs = (line.partition(":") for line in lines if line)
    return {name.strip().lower(): value.strip() for name, _, value in pairs}


async def _chunks(reader: asyncio.StreamReader):  # type: ignore[no-untyped-def]
    while True:
        line = await reader.readline()
        size = int(line.partition(b";")[0], 16)
        yield line + await reader.readexactly(size + 2)
        if size == 0:
            return


async def _body(request: Request, reader: asyncio.StreamReader):  # type: ignore[no-untyped-def]
    if request.chunked:
        async for piece in _chunks(reader):
            yield piece
        return
    left = request.length
    while left:
        piece = await reader.read(min(left, 1 << 16))
        if not piece:
            raise ConnectionResetError
        left -= len(piece)
        yield piece


async def _drain(request: Request, reader: asyncio.StreamReader) -> None:
    async for _ in _body(request, reader):
        pass


async def _say(writer: asyncio.StreamWriter, status: int, body: bytes, extra: str = "") -> bool:
    reason = REASONS.get(status, "Error")
    head = f"HTTP/1.1 {status} {reason}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
    writer.write((head + extra + "\r\n").encode() + body)
    await writer.drain()
    return True


def _reset(writer: asyncio.StreamWriter) -> bool:
    """Closes with a RST, not a FIN: what was under way is lost."""
    endpoint = writer.get_extra_info("socket")
    endpoint.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()
    return False


def _error(code: str) -> bytes:
    return json.dumps({"errors": [{"code": code, "message": "injected", "detail": None}]}).encode()
