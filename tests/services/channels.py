"""Folders of conda channels over HTTP on 127.0.0.1, with the faults that tests ask for.

    with channel_server(folder) as server:         # folder/<channel>/noarch/repodata.json ...
        server.fail("repodata", Fault(status=503, times=2))

Real records (`FACTORY_TEST_CHANNELS`, a folder that is no part of this repository) are served by the fixture
`real_channels`: conda-forge, pytorch and nvidia with labels. Without the variable its tests are not run and
listed as such; nothing else may be left out.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import ssl
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest

VARIABLE = "FACTORY_TEST_CHANNELS"


@dataclass(kw_only=True)
class Fault:
    """What is done to a file that is asked for instead of sending it whole.

    `status` answers that alone. `cut` sends half of it: `connection` says the whole length and hangs up,
    `file` says half of the length, as if the file itself were cut. `drop` hangs up without a word. `times`
    is how often; None for ever.
    """

    status: int = 0
    cut: str = ""
    drop: bool = False
    times: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ChannelOptions:
    """Who may read: `users` by name and password, a `bearer` token, or a `token` in the address (/t/...).

    `certificate` is the PEM file of a TLS server, key included.
    """

    users: Mapping[str, str] = field(default_factory=dict)
    bearer: str = ""
    token: str = ""
    certificate: Path | None = None


@dataclass(kw_only=True)
class ChannelServer:
    """`asked` are the paths of all requests, in their order, `sent` counts the bytes of their answers;
    `ends_after` answers so many, then no more."""

    url: str
    folder: Path
    options: ChannelOptions
    asked: list[str] = field(default_factory=list)
    sent: int = 0
    faults: list[tuple[str, Fault]] = field(default_factory=list)
    ends_after: int | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)

    def fail(self, pattern: str, fault: Fault) -> None:
        """From now on `fault` meets what matches `pattern` (a regular expression found in its path)."""
        self.faults.append((pattern, fault))

    def mend(self) -> None:
        self.faults.clear()
        self.ends_after = None

    def fault_of(self, path: str) -> Fault | None:
        """The fault of this request, counted; None for a good answer."""
        with self.lock:
            self.asked.append(path)
            if self.ends_after is not None:
                self.ends_after -= 1
                if self.ends_after < 0:
                    return Fault(drop=True)
            for pattern, fault in self.faults:
                if re.search(pattern, path) and fault.times != 0:
                    if fault.times:
                        fault.times -= 1
                    return fault
        return None


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Any

    def log_message(self, format: str, *args: object) -> None:
        pass

    def handle(self) -> None:
        try:
            super().handle()
        except (ConnectionError, ssl.SSLError):
            self.close_connection = True

    def do_HEAD(self) -> None:
        self._answer(send=False)

    def do_GET(self) -> None:
        self._answer(send=True)

    def _answer(self, *, send: bool) -> None:
        site: ChannelServer = self.server.site
        path = unquote(urlsplit(self.path).path)
        fault = site.fault_of(path)
        if fault and fault.drop:
            self.close_connection = True
            return None
        if site.options.token:
            before, path = path, path.removeprefix(f"/t/{site.options.token}")
            if before == path:
                return self._say(401)
        if not self._may_read(site.options):
            return self._say(401, {"WWW-Authenticate": 'Basic realm="channels"'})
        if fault and fault.status:
            return self._say(fault.status)
        file = (site.folder / path.lstrip("/")).resolve()
        if not file.is_relative_to(site.folder.resolve()) or not file.is_file():
            return self._say(404)
        return self._send(file, fault, send=send)

    def _may_read(self, options: ChannelOptions) -> bool:
        kind, _, given = self.headers.get("Authorization", "").partition(" ")
        if options.bearer:
            return (kind, given) == ("Bearer", options.bearer)
        if options.users:
            known = [base64.b64encode(f"{u}:{p}".encode()).decode() for u, p in options.users.items()]
            return kind == "Basic" and given in known
        return True

    def _send(self, file: Path, fault: Fault | None, *, send: bool) -> None:
        data, status, headers = file.read_bytes(), 200, {}
        tag = f'"{file.stat().st_mtime_ns:x}"'
        if self.headers.get("If-None-Match") == tag:
            return self._say(304, {"ETag": tag})
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if asked:
            first, last = int(asked[1]), min(int(asked[2] or len(data) - 1), len(data) - 1)
            if first >= len(data):
                return self._say(416)
            headers["Content-Range"] = f"bytes {first}-{last}/{len(data)}"
            data, status = data[first : last + 1], 206
        body = data[: len(data) // 2] if fault and fault.cut else data
        told = len(body) if fault and fault.cut == "file" else len(data)
        self.send_response(status)
        for name, value in {**headers, "ETag": tag, "Content-Length": str(told)}.items():
            self.send_header(name, value)
        self.end_headers()
        if send:
            with self.server.site.lock:  # before they go: who has read them may look
                self.server.site.sent += len(body)
            self.wfile.write(body)
            self.close_connection = self.close_connection or told != len(body)
        return None

    def _say(self, status: int, headers: Mapping[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {**(headers or {}), "Content-Length": "0"}.items():
            self.send_header(name, value)
        self.end_headers()


@contextmanager
def channel_server(folder: Path, options: ChannelOptions | None = None) -> Iterator[ChannelServer]:
    """Serves the channels below `folder`: `<url>/<channel>/<subdir>/...`."""
    options = options or ChannelOptions()
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    server.daemon_threads = True
    scheme = "http"
    if options.certificate:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(options.certificate)
        server.socket = context.wrap_socket(
            server.socket, server_side=True, do_handshake_on_connect=False
        )  # the handshake belongs to the request's own thread
        scheme = "https"
    site = ChannelServer(
        url=f"{scheme}://127.0.0.1:{server.server_address[1]}", folder=folder, options=options
    )
    server.site = site  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield site
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def record(name: str, version: str, *depends: str, **more: Any) -> dict[str, Any]:
    """A package as an index has it; `more` sets other fields (build, build_number, constrains, subdir)."""
    build = str(more.pop("build", "0"))
    row = {
        "name": name,
        "version": version,
        "build": build,
        "build_number": 0,
        "depends": list(depends),
        "constrains": [],
        "md5": hashlib.md5(f"{name} {version} {build}".encode()).hexdigest(),
        "sha256": hashlib.sha256(f"{name} {version} {build}".encode()).hexdigest(),
        "size": 1000,
        "subdir": "linux-64",
        "timestamp": 1_700_000_000_000,
        **more,
    }
    return {key: value for key, value in row.items() if value is not None}


def write_channel(folder: Path, *records: Mapping[str, Any]) -> Path:
    """The index of a channel in `folder`, of packages that nobody can fetch: enough to solve."""
    for subdir in ("linux-64", "noarch"):
        packages = {
            f"{row['name']}-{row['version']}-{row['build']}.conda": dict(row)
            for row in records
            if row["subdir"] == subdir
        }
        (folder / subdir).mkdir(parents=True, exist_ok=True)
        data = {"info": {"subdir": subdir}, "packages": {}, "packages.conda": packages, "repodata_version": 1}
        (folder / subdir / "repodata.json").write_text(json.dumps(data))
    return folder


def real_folder() -> Path:
    """The folder of real records. Lists the test as not run where none is named."""
    named = os.environ.get(VARIABLE, "")
    if not named:
        pytest.skip(f"not run: ${VARIABLE} names no folder of real records")
    folder = Path(named)
    if not (folder / "conda-forge/noarch/repodata.json.zst").is_file():
        pytest.fail(f"${VARIABLE}: {folder} holds no records of conda-forge")
    return folder


@pytest.fixture(scope="session")
def real_channels() -> Iterator[ChannelServer]:
    """The real records; the setting `channels` that leads to them is `{CHANNEL_ROOT}={server.url}`."""
    with channel_server(real_folder()) as server:
        yield server
