"""Asks a daemon on a socket whether it answers."""

from __future__ import annotations

import socket
from pathlib import Path


def answers(path: Path) -> bool:
    """Whether docker's API at `path` says that it is well."""
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(5)
        try:
            client.connect(str(path))
            client.sendall(b"GET /_ping HTTP/1.0\r\nHost: docker\r\n\r\n")
            return b" 200 " in client.recv(200)
        except OSError:
            return False
