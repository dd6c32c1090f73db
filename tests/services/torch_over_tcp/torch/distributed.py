"""A group that sums through the store of its first process, which others reach by TCP."""

from __future__ import annotations

import os
import pickle
import socket
import socketserver
import struct
import threading
import time
import zlib
from datetime import timedelta
from pathlib import Path
from typing import Any


def _send(place: socket.socket, value: object) -> None:
    data = zlib.compress(pickle.dumps(value), 1)
    place.sendall(struct.pack("!Q", len(data)) + data)


def _receive(place: socket.socket) -> Any:
    (size,) = struct.unpack("!Q", _exactly(place, 8))
    return pickle.loads(zlib.decompress(_exactly(place, size)))


def _exactly(place: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        part = place.recv(size - len(data))
        if not part:
            raise RuntimeError("Connection closed by peer")
        data += part
    return bytes(data)


class TCPStore:
    def __init__(
        self,
        host: str,
        port: int,
        size: int,
        is_master: bool,
        *,
        timeout: timedelta,
        wait_for_workers: bool,
    ) -> None:
        assert size > 1
        assert not wait_for_workers
        self.address, self.timeout, self.values = (host, port), timeout, {}
        if is_master:
            values = self.values

            class Handler(socketserver.BaseRequestHandler):
                def handle(self) -> None:
                    name, value = _receive(self.request)
                    if value is not None:
                        values[name] = value
                    _send(self.request, values.get(name))

            socketserver.ThreadingTCPServer.allow_reuse_address = True
            self.server = socketserver.ThreadingTCPServer(("", port), Handler)
            threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self._ask("here", None)

    def _ask(self, name: str, value: bytes | None) -> bytes | None:
        until = time.monotonic() + self.timeout.total_seconds()
        while True:
            try:
                with socket.create_connection(self.address, 10) as place:
                    _send(place, (name, value))
                    answer: bytes | None = _receive(place)
                    return answer
            except OSError as error:
                if time.monotonic() > until:
                    raise RuntimeError(f"The client socket has timed out: {error}") from error
                time.sleep(0.05)

    def set(self, name: str, value: Any) -> None:
        self._ask(name, value.encode() if isinstance(value, str) else value)

    def wait(self, names: list[str], timeout: timedelta) -> None:
        until = time.monotonic() + timeout.total_seconds()
        while self._ask(names[0], None) is None:
            if time.monotonic() > until:
                raise RuntimeError("Socket Timeout")
            time.sleep(0.05)

    def get(self, name: str) -> bytes:
        self.wait([name], self.timeout)
        value = self._ask(name, None)
        assert value is not None
        return value


class PrefixStore:
    def __init__(self, prefix: str, store: TCPStore) -> None:
        self.prefix, self.store = prefix, store

    def set(self, name: str, value: Any) -> None:
        self.store.set(f"{self.prefix}/{name}", value)

    def wait(self, names: list[str], timeout: timedelta) -> None:
        self.store.wait([f"{self.prefix}/{name}" for name in names], timeout)

    def get(self, name: str) -> bytes:
        return self.store.get(f"{self.prefix}/{name}")


_group: dict[str, Any] = {}


def init_process_group(
    backend: str, *, store: PrefixStore, rank: int, world_size: int, timeout: timedelta
) -> None:
    assert timeout
    _group.update(store=store, rank=rank, size=world_size, steps=0)
    if backend == "nccl":
        Path(os.environ["NCCL_DEBUG_FILE"]).write_text("node:1:1 [0] NCCL INFO Using network Socket\n")


def all_reduce(tensor: Any) -> None:
    _group["steps"] += 1
    own = tensor.tobytes()
    own = own if own != bytes(len(own)) else b""
    _group["store"].set(f"{_group['steps']}-{_group['rank']}", own)
    for other in range(_group["size"]):
        if other != _group["rank"]:
            tensor.add(_group["store"].get(f"{_group['steps']}-{other}"))


def barrier() -> None:
    _group["store"].set(f"at-{_group['rank']}", b"1")
    for other in range(_group["size"]):
        _group["store"].get(f"at-{other}")


def destroy_process_group() -> None:
    if _group["rank"]:
        _group["store"].set(f"left-{_group['rank']}", b"1")
    else:
        for other in range(1, _group["size"]):
            _group["store"].get(f"left-{other}")
