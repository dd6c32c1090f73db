"""A package index of the tests on 127.0.0.1, and uv set to it."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import sys
import tarfile
import threading
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote

from imagefactory.lock.pypi.index import find_index
from imagefactory.lock.pypi.uv import UvLocker
from imagefactory.settings.choices import SettingValue
from tests.made.wheels import record_row


@dataclass
class Index:
    """A package index: PEP 503's HTML, or PEP 691's JSON; with a password where one is set."""

    folder: Path
    url: str = ""
    json: bool = False
    core_metadata: bool = False  # PEP 658
    hashes: str = "sha256"  # or another algorithm, or none
    password: str = ""
    rows: dict[str, list[str]] = field(default_factory=dict)  # project -> files
    uploaded: dict[str, str] = field(default_factory=dict)  # file -> its time (PEP 700)
    lies: dict[str, str] = field(default_factory=dict)  # file -> a hash that is not its own
    provenance: dict[str, bytes | None] | None = (
        None  # PEP 740: of some files; None is a URL that is not there
    )
    broken: set[str] = field(default_factory=set)  # files whose provenance breaks off
    hidden: set[str] = field(default_factory=set)
    yanked: set[str] = field(default_factory=set)
    requests: list[str] = field(default_factory=list)
    own_requests: list[str] = field(default_factory=list)  # those of imagefactory itself, not of uv

    def add(
        self,
        name: str,
        version: str,
        *,
        needs: tuple[str, ...] = (),
        extras: tuple[str, ...] = (),
        files: Mapping[str, str] | None = None,
        tag: str = "py3-none-any",
    ) -> None:
        filename = f"{name.replace('-', '_')}-{version}-{tag}.whl"
        info = filename.split("-py3")[0].split("-cp3")[0] + ".dist-info"
        metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        metadata += "".join(f"Provides-Extra: {extra}\n" for extra in extras)
        metadata += "".join(f"Requires-Dist: {need}\n" for need in needs)
        texts = {
            **(files or {}),
            f"{info}/METADATA": metadata,
            f"{info}/WHEEL": f"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: {tag}\n",
        }
        rows = [record_row(path, text.encode()) for path, text in texts.items()]
        texts[f"{info}/RECORD"] = "\n".join([*rows, f"{info}/RECORD,,", ""])
        with zipfile.ZipFile(self.folder / filename, "w") as archive:
            for path, text in texts.items():
                archive.writestr(zipfile.ZipInfo(path), text)
        self.publish(name, filename)

    def add_sdist(self, name: str, version: str, *, needs: tuple[str, ...] = (), **files: str) -> None:
        """A source distribution that says what it requires; `__` in the name of a file is `.`."""
        stem = f"{name.replace('-', '_')}-{version}"
        metadata = f"Metadata-Version: 2.2\nName: {name}\nVersion: {version}\n"
        metadata += "".join(f"Requires-Dist: {need}\n" for need in needs)
        texts = {"PKG-INFO": metadata, "setup.py": "raise SystemExit('it was run')\n"}
        texts |= {file.replace("__", "."): text for file, text in files.items()}
        with tarfile.open(self.folder / f"{stem}.tar.gz", "w:gz") as tar:
            for path, text in texts.items():
                info = tarfile.TarInfo(f"{stem}/{path}")
                info.size = len(text)
                tar.addfile(info, io.BytesIO(text.encode()))
        self.publish(name, f"{stem}.tar.gz")

    def metadata(self, filename: str) -> bytes:
        """METADATA of a wheel, as PEP 658 has it beside the file."""
        with zipfile.ZipFile(self.folder / filename) as archive:
            return next(archive.read(name) for name in archive.namelist() if name.endswith("/METADATA"))

    def publish(self, name: str, filename: str) -> None:
        self.rows.setdefault(name, []).append(filename)

    def hash(self, filename: str) -> str:
        if filename in self.lies:
            return self.lies[filename]
        return hashlib.new(self.hashes, (self.folder / filename).read_bytes()).hexdigest()

    def provenance_url(self, filename: str) -> str | None:
        return f"../../integrity/{filename}" if filename in (self.provenance or {}) else None

    def page(self, name: str) -> tuple[str, str]:
        files = [file for file in self.rows[name] if file not in self.hidden]
        if self.json:
            rows = [
                {
                    "filename": file,
                    "url": f"../../files/{file}",
                    "hashes": {self.hashes: self.hash(file)} if self.hashes else {},
                    "yanked": file in self.yanked,
                    "core-metadata": self.core_metadata,
                    **({"upload-time": self.uploaded[file], "size": 1} if file in self.uploaded else {}),
                    **({} if self.provenance is None else {"provenance": self.provenance_url(file)}),
                }
                for file in files
            ]
            text = json.dumps(
                {"meta": {"api-version": "1.1" if self.uploaded else "1.0"}, "name": name, "files": rows}
            )
            return "application/vnd.pypi.simple.v1+json", text
        anchors = "".join(
            f'<a href="../../files/{file}{f"#{self.hashes}={self.hash(file)}" if self.hashes else ""}"'
            f"{' data-yanked=bad' if file in self.yanked else ''}"
            f"{' data-core-metadata=true' if self.core_metadata else ''}"
            f"{f' data-provenance={url}' if (url := self.provenance_url(file)) else ''}>{file}</a>\n"
            for file in files
        )
        return "text/html", f"<!DOCTYPE html><html><body>\n{anchors}</body></html>"


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    index: Index

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        index = self.index
        index.requests.append(f"{self.command} {self.path}")
        if self.headers.get("User-Agent") == "imagefactory":
            index.own_requests.append(index.requests[-1])
        sent = base64.b64decode(self.headers.get("Authorization", "").removeprefix("Basic ")).decode()
        place, _, rest = unquote(self.path).lstrip("/").partition("/")
        status, kind, body = 404, "text/plain", b""
        if index.password and sent != f"bob:{index.password}":
            status = 401
        elif place == "simple" and rest.rstrip("/") in index.rows:
            kind, text = index.page(rest.rstrip("/"))
            status, body = 200, text.encode()
        elif index.core_metadata and rest.endswith(".whl.metadata"):
            status, body = 200, index.metadata(rest.removesuffix(".metadata"))
        elif place == "integrity" and (data := (index.provenance or {}).get(rest)):
            status, kind, body = 200, "application/vnd.pypi.integrity.v1+json", data
        elif place == "files" and (index.folder / rest).is_file():
            status, kind, body = 200, "application/zip", (index.folder / rest).read_bytes()
        self.send_response(status)
        if status == 401:
            self.send_header("WWW-Authenticate", 'Basic realm="test"')
        self.send_header("Content-Type", kind)
        self.send_header("Cache-Control", "no-store")
        breaks = place == "integrity" and rest in index.broken
        self.send_header("Content-Length", str(len(body) + breaks))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)
        self.close_connection |= breaks


@contextmanager
def package_index(folder: Path) -> Iterator[Index]:
    """An empty index that keeps its files in `folder`, while it is served."""
    folder.mkdir()
    index = Index(folder=folder)
    http = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"index": index}))
    http.daemon_threads = True
    index.url = f"http://127.0.0.1:{http.server_address[1]}/simple"
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield index
    finally:
        http.shutdown()
        thread.join()
        http.server_close()


def uv_locker(index: Index, tmp_path: Path, *, url: str = "", **environ: str) -> UvLocker:
    (tmp_path / "home").mkdir(exist_ok=True)
    # No cache between calls (uv keeps pages for ten minutes), no settings but those of the test.
    given = {"HOME": str(tmp_path / "home"), "PATH": "/usr/bin", "UV_HTTP_RETRIES": "0", **environ}
    setting = SettingValue(value=url or index.url, origin="$IMAGEFACTORY_INDEX")
    found = find_index(setting, environ=given, prefix=tmp_path, etc=tmp_path / "etc")
    cache = {"UV_CACHE_DIR": str(tmp_path / "uv-cache"), "UV_NO_CACHE": "1"}
    return UvLocker(
        replace(found, environment=tuple((dict(found.environment) | cache).items())),
        python=Path(sys.executable),
    )
