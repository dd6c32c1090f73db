"""The cache of packages against a real HTTP server on 127.0.0.1 that misbehaves as asked."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import random
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from imagefactory.errors import DownloadError, ImagefactoryError
from imagefactory.http import HttpSession, RetryPolicy
from imagefactory.lock.download import FileOrigin, PackageCache, PendingDownloads
from imagefactory.lock.pypi.index import PackageIndex
from imagefactory.model import LockedCondaPackage, LockedWheel
from imagefactory.progress import ProgressTask, QuietProgress
from tests.made.errors import fails
from tests.services.children import LIMIT, child, wait_for

Wanted = tuple[LockedWheel, ...]
INDEX = PackageIndex(url="", origin="test", certificates="", proxy="", environment=())
QUICK = RetryPolicy(attempts=4, first_wait=0.01, longest_wait=0.05, connect=60, read=60, threads=4)


@dataclass
class Faults:
    """What the server does with the next requests for a file: one word each, then it behaves."""

    files: dict[str, bytes] = field(default_factory=dict)
    next: dict[str, list[str]] = field(default_factory=dict)
    requests: list[tuple[str, str]] = field(default_factory=list)  # file, Range
    sent: dict[str, int] = field(default_factory=dict)
    go_on: threading.Event = field(default_factory=threading.Event)  # what "stall" and "held" wait for
    over: threading.Event = field(default_factory=threading.Event)  # what the last bytes of "held" wait for
    url: str = ""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    faults: Faults

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        name = self.path.lstrip("/")
        asked = self.headers.get("Range", "")
        self.faults.requests.append((name, asked))
        queue = self.faults.next.get(name, [])
        fault = queue.pop(0) if queue else ""
        if fault.isdigit():
            self.send_response(int(fault))
            self.send_header("Retry-After", "0")
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        if name not in self.faults.files:
            self.send_error(404)
            return
        body = self.faults.files[name]
        if fault == "wrong-bytes":
            body = bytes(len(body))
        if fault == "short":  # well-formed, but not the whole file
            body = body[: len(body) // 2]
        start = 0
        if asked and fault not in ("ignore-range", "short"):
            start = int(asked.removeprefix("bytes=").partition("-")[0])
            shown = start + 1 if fault == "wrong-range" else start
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {shown}-{len(body) - 1}/{len(body)}")
        else:
            self.send_response(200)
        payload = body[start:]
        self.send_header("Content-Length", str(len(payload)))
        self.end_headers()
        if fault == "stall":
            self.faults.go_on.wait()
            self.close_connection = True
            return
        cut = len(payload) // 2 if fault in ("reset", "close") else len(payload)
        try:
            for at in range(0, cut, 1 << 16):
                piece = payload[at : min(at + (1 << 16), cut)]
                # Counted before they go: who has read them may look.
                self.faults.sent[name] = self.faults.sent.get(name, 0) + len(piece)
                self.wfile.write(piece)
                if fault == "slow":
                    time.sleep(0.02)
                if fault == "held" and at >= cut // 2:
                    self.faults.go_on.wait()
                    if at + (2 << 16) >= cut:
                        self.faults.over.wait()
                    time.sleep(0.02)
        except OSError:
            self.close_connection = True
            return
        if fault == "reset":
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.connection.close()
        if fault in ("reset", "close"):
            self.close_connection = True


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: object, client_address: object) -> None:
        pass  # torn connections are the point


@pytest.fixture
def server() -> Iterator[Faults]:
    faults = Faults()
    handler = type("Handler", (_Handler,), {"faults": faults})
    http = _Server(("127.0.0.1", 0), handler)
    faults.url = f"http://127.0.0.1:{http.server_address[1]}"
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield faults
    faults.go_on.set()
    faults.over.set()
    http.shutdown()
    thread.join()
    http.server_close()


class Counted(QuietProgress):
    """Progress that remembers what it was told."""

    def __init__(self) -> None:
        self.total, self.done = -1, 0

    def task(
        self, title: str, *, total: int = 0, unit: str = "bytes"
    ) -> AbstractContextManager[ProgressTask]:
        self.total = total
        outer = self

        class One:
            def advance(self, amount: int) -> None:
                assert amount > 0
                outer.done += amount

            def expect(self, total: int) -> None:
                outer.total = total

        return nullcontext(One())


def offer(server: Faults, *sizes: int, seed: int = 1) -> Wanted:
    """Wheels that the server has; the bytes come from `seed`."""
    wheels = []
    for number, size in enumerate(sizes):
        data = random.Random(seed * 1000 + number).randbytes(size)
        name = f"pack{number}"
        filename = f"{name}-1.0-py3-none-any.whl"
        server.files[filename] = data
        wheels.append(
            LockedWheel(
                name=name,
                version="1.0",
                filename=filename,
                sha256=hashlib.sha256(data).hexdigest(),
                size=size,
            )
        )
    return tuple(wheels)


def locate(server: Faults) -> Callable[[Wanted], dict[str, str]]:
    return lambda wanted: {wheel.filename: f"{server.url}/{wheel.filename}" for wheel in wanted}


def never(wanted: Wanted) -> dict[str, str]:
    raise AssertionError(f"asked for addresses of {[wheel.name for wheel in wanted]}")


@pytest.fixture
def cache(tmp_path: Path) -> PackageCache:
    return PackageCache(tmp_path / "cache", INDEX, retry_policy=QUICK)


def whole(server: Faults, paths: dict[LockedWheel, Path]) -> bool:
    return all(path.read_bytes() == server.files[wheel.filename] for wheel, path in paths.items())


def test_fetches_in_the_locks_order_and_then_needs_no_network(server: Faults, cache: PackageCache) -> None:
    wanted = offer(server, 10, 3_000_000, 70_000, 1, 250_000)
    progress = Counted()
    paths = cache.fetch(wanted, locate(server), progress)
    assert tuple(paths) == wanted
    assert whole(server, paths)
    assert progress.done == progress.total == sum(wheel.size for wheel in wanted)
    digest = wanted[0].sha256
    assert paths[wanted[0]] == cache.folder / "wheels" / digest[:2] / digest / "pack0-1.0-py3-none-any.whl"
    server.requests.clear()
    assert cache.fetch(wanted, never, QuietProgress()) == paths
    assert server.requests == []


def test_another_place_has_what_the_server_lacks(server: Faults, cache: PackageCache) -> None:
    wanted = offer(server, 10, 3_000_000, 70_000)
    lost = wanted[1]
    data = server.files.pop(lost.filename)
    part = cache.path(lost).with_name(lost.filename + ".part")
    part.parent.mkdir(parents=True)
    part.write_bytes(data[:1000])
    positions: list[int] = []
    errors: list[str] = []

    def read(offset: int) -> Iterator[bytes]:
        positions.append(offset)
        return iter((server_data[offset:],))

    def fallback(sizes: Mapping[str, int], error: ImagefactoryError) -> dict[str, FileOrigin]:
        errors.append(error.code)
        return {sha256: origins[sha256] for sha256 in sizes if sha256 in origins}

    server_data, origins = data, dict[str, FileOrigin]()
    arrivals = PendingDownloads((wheel, cache.path(wheel)) for wheel in wanted)
    with fails("download-rejected"):
        cache.fetch(wanted, locate(server), QuietProgress(), arrivals=arrivals, fallback=fallback)
    everywhere = {wheel.filename: server.files.get(wheel.filename, data) for wheel in wanted}
    for wheel in wanted:
        content = everywhere[wheel.filename]
        origins[wheel.sha256] = FileOrigin("other", lambda at, content=content: iter((content[at:],)))  # type: ignore[misc]
    origins[lost.sha256] = FileOrigin("other", read)
    cache.fetch(wanted, locate(server), QuietProgress(), arrivals=arrivals, fallback=fallback)
    assert errors == ["download-rejected"] * 2
    assert positions == [1000]
    assert cache.path(lost).read_bytes() == data
    assert not arrivals.stop.is_set()
    arrivals.wait_for_all()


def test_asks_only_for_what_is_missing(server: Faults, cache: PackageCache) -> None:
    wanted = offer(server, 1000, 2000, 3000)
    cache.fetch(wanted, locate(server), QuietProgress())
    cache.path(wanted[1]).unlink()
    asked: list[str] = []

    def remember(missing: Wanted) -> dict[str, str]:
        asked.extend(wheel.name for wheel in missing)
        return locate(server)(missing)

    progress = Counted()
    assert whole(server, cache.fetch(wanted, remember, progress))
    assert asked == ["pack1"]
    assert progress.total == progress.done == 2000


@pytest.mark.parametrize("status", ["408", "429", "500", "502", "503", "504"])
def test_a_busy_server_is_asked_again(server: Faults, cache: PackageCache, status: str) -> None:
    wanted = offer(server, 5000)
    server.next["pack0-1.0-py3-none-any.whl"] = [status, status]
    assert whole(server, cache.fetch(wanted, locate(server), QuietProgress()))
    assert len(server.requests) == 3


@pytest.mark.parametrize("fault", ["reset", "close"])
def test_a_torn_download_goes_on_where_it_was(server: Faults, cache: PackageCache, fault: str) -> None:
    size = 64 << 16  # its halves end where a network chunk ends
    wanted = offer(server, size)
    name = wanted[0].filename
    server.next[name] = [fault, fault, fault]
    progress = Counted()
    assert whole(server, cache.fetch(wanted, locate(server), progress))
    starts = [int(asked[6:-1]) if asked else 0 for _, asked in server.requests]
    assert len(starts) == 4
    assert starts == sorted(starts)
    assert starts[-1] > 0
    assert progress.done == progress.total == size
    if fault == "close":  # nothing in flight is lost, so no byte comes twice
        assert server.sent[name] == size


def test_more_tears_than_attempts_while_bytes_keep_coming(server: Faults, cache: PackageCache) -> None:
    wanted = offer(server, 64 << 16)
    server.next[wanted[0].filename] = ["close"] * 6  # QUICK.attempts is 4
    assert whole(server, cache.fetch(wanted, locate(server), QuietProgress()))


@pytest.mark.parametrize("fault", ["ignore-range", "wrong-range"])
def test_a_server_that_does_not_honour_range_starts_again(
    server: Faults, cache: PackageCache, fault: str
) -> None:
    wanted = offer(server, 300_000)
    name = wanted[0].filename
    server.next[name] = ["close", fault]
    progress = Counted()
    assert whole(server, cache.fetch(wanted, locate(server), progress))
    assert progress.done == 300_000


def test_a_part_of_other_bytes_is_thrown_away(server: Faults, cache: PackageCache) -> None:
    wanted = offer(server, 300_000)
    path = cache.path(wanted[0])
    path.parent.mkdir(parents=True)
    part = path.with_name(path.name + ".part")
    part.write_bytes(b"something else" * 1000)
    assert whole(server, cache.fetch(wanted, locate(server), QuietProgress()))
    assert [asked for _, asked in server.requests] == ["bytes=14000-", ""]
    assert not part.exists()


@pytest.mark.parametrize("length", [300_000, 300_001])
def test_a_part_as_long_as_the_file_or_longer(server: Faults, cache: PackageCache, length: int) -> None:
    wanted = offer(server, 300_000)
    path = cache.path(wanted[0])
    path.parent.mkdir(parents=True)
    data = server.files[wanted[0].filename]
    path.with_name(path.name + ".part").write_bytes(data + b"x" * (length - len(data)))
    assert whole(server, cache.fetch(wanted, locate(server), QuietProgress()))
    assert len(server.requests) == length - 300_000  # a whole part needs no request at all


def test_wrong_bytes_once_are_mended(server: Faults, cache: PackageCache) -> None:
    wanted = offer(server, 300_000)
    server.next[wanted[0].filename] = ["wrong-bytes"]
    assert whole(server, cache.fetch(wanted, locate(server), QuietProgress()))


def test_wrong_bytes_again_are_refused_and_not_kept(server: Faults, cache: PackageCache) -> None:
    wanted = offer(server, 300_000)
    wheel = wanted[0]
    server.next[wheel.filename] = ["wrong-bytes"] * 9
    with fails("hash-mismatch") as caught:
        cache.fetch(wanted, locate(server), QuietProgress())
    got = hashlib.sha256(bytes(300_000)).hexdigest()
    assert "pack0 1.0" in caught.value.message
    assert wheel.sha256 in caught.value.message
    assert got in caught.value.message
    assert [path.name for path in cache.path(wheel).parent.iterdir()] == [".lock"]
    assert len(server.requests) == 2


def test_a_file_of_another_length_is_refused(server: Faults, cache: PackageCache) -> None:
    wanted = offer(server, 300_000)
    server.next[wanted[0].filename] = ["short"]
    with fails("download-rejected", message=("150000 bytes", "300000")):
        cache.fetch(wanted, locate(server), QuietProgress())
    assert not cache.path(wanted[0]).exists()


def test_a_missing_file_is_said_at_once_without_credentials(server: Faults, cache: PackageCache) -> None:
    wanted = offer(server, 1000)
    server.files.clear()
    secret = server.url.replace("://", "://bob:hunter2@")
    with fails("download-rejected", message="404", hint="--upgrade-package pack0") as caught:
        cache.fetch(
            wanted, lambda wanted: {wanted[0].filename: f"{secret}/x.whl?sig=canary"}, QuietProgress()
        )
    assert "hunter2" not in str(caught.value)
    assert "canary" not in str(caught.value)
    assert len(server.requests) == 1


def test_a_server_that_stays_broken_is_given_up_and_what_came_is_kept(
    server: Faults, cache: PackageCache
) -> None:
    wanted = offer(server, 16 << 16)
    name = wanted[0].filename
    server.next[name] = ["close"] + ["503"] * 20
    with fails("download-failed", message="503"):
        cache.fetch(wanted, locate(server), QuietProgress())
    server.next[name] = []
    server.requests.clear()
    progress = Counted()
    assert whole(server, cache.fetch(wanted, locate(server), progress))
    assert server.requests == [(name, f"bytes={8 << 16}-")]
    assert progress.done == progress.total == 8 << 16


def test_a_silent_server_is_asked_again(server: Faults, cache: PackageCache) -> None:
    wanted = offer(server, 1000)
    server.next[wanted[0].filename] = ["stall"]
    hurried = PackageCache(cache.folder, INDEX, retry_policy=replace(QUICK, attempts=99, read=0.5))
    assert whole(server, hurried.fetch(wanted, locate(server), QuietProgress()))
    assert len(server.requests) > 1


def test_one_failure_stops_the_others_and_keeps_their_parts(server: Faults, tmp_path: Path) -> None:
    cache = PackageCache(tmp_path, INDEX, retry_policy=QUICK)
    wanted = offer(server, 8_000_000, 1000)
    server.next[wanted[0].filename] = ["held"]
    server.next[wanted[1].filename] = ["404"]
    server.go_on.set()
    with fails("download-rejected", message="404"):
        cache.fetch(wanted, locate(server), QuietProgress())
    assert not cache.path(wanted[0]).exists()  # the slow one was not waited for
    assert whole(server, cache.fetch(wanted, locate(server), QuietProgress()))


def test_a_disk_too_small_is_said_before_the_first_byte(server: Faults, cache: PackageCache) -> None:
    wanted = offer(server, 1000)
    huge = (replace(wanted[0], size=900_000_000_000_000),)
    with fails("cache-full", message="900000000000000 bytes") as caught:
        cache.fetch(huge, never, QuietProgress())
    assert str(cache.folder) in caught.value.message
    assert "cache" in caught.value.hint


def test_a_disk_that_fills_up(server: Faults, cache: PackageCache, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = offer(server, 3_000_000)

    def fill(_: int) -> None:
        with Path("/dev/full").open("wb", buffering=0) as full:
            full.write(b"1")  # a real ENOSPC

    monkeypatch.setattr(os, "fdatasync", fill)
    with fails("cache-full", message="3000000 bytes") as caught:
        cache.fetch(wanted, locate(server), QuietProgress())
    assert isinstance(caught.value.__cause__, OSError)
    assert caught.value.__cause__.errno == errno.ENOSPC


def test_a_link_in_the_cache_is_not_written_through(
    server: Faults, cache: PackageCache, tmp_path: Path
) -> None:
    wanted = offer(server, 5000)
    path, mine = cache.path(wanted[0]), tmp_path / "mine"
    mine.write_text("mine" * 5000)
    path.parent.mkdir(parents=True)
    path.with_name(path.name + ".part").symlink_to(mine)
    with pytest.raises(DownloadError):
        cache.fetch(wanted, locate(server), QuietProgress())
    assert mine.read_text() == "mine" * 5000


def test_a_cache_that_is_no_folder(server: Faults, tmp_path: Path) -> None:
    (tmp_path / "wheels").write_text("a file")
    with fails("cannot-write-file", message="wheels"):
        PackageCache(tmp_path, INDEX).fetch(offer(server, 10), never, QuietProgress())


def test_a_file_of_another_size_is_fetched_again(server: Faults, cache: PackageCache) -> None:
    wanted = offer(server, 5000)
    path = cache.fetch(wanted, locate(server), QuietProgress())[wanted[0]]
    assert cache.missing(wanted) == ()
    path.write_bytes(bytes(4999))
    assert whole(server, cache.fetch(wanted, locate(server), QuietProgress()))


def test_a_file_url_is_read_and_checked(server: Faults, cache: PackageCache, tmp_path: Path) -> None:
    wanted = offer(server, 3_000_000)
    name = wanted[0].filename
    (tmp_path / "with space").mkdir()
    (tmp_path / "with space" / name).write_bytes(server.files[name])
    where = {name: (tmp_path / "with space" / name).as_uri()}
    assert whole(server, cache.fetch(wanted, lambda wanted: where, QuietProgress()))
    assert server.requests == []


_CHILD = """
import json, sys
from pathlib import Path
from imagefactory.lock.download import FileOrigin, PackageCache, PendingDownloads
from imagefactory.lock.pypi.index import PackageIndex
from imagefactory.model import LockedWheel
from imagefactory.progress import QuietProgress
from imagefactory.http import RetryPolicy

folder, url, rows = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
wanted = tuple(LockedWheel(**row) for row in rows)
index = PackageIndex(url="", origin="", certificates="", proxy="", environment=())
cache = PackageCache(Path(folder), index, retry_policy=RetryPolicy(first_wait=0.01, read=5))
cache.fetch(wanted, lambda wanted: {w.filename: f"{url}/{w.filename}" for w in wanted}, QuietProgress())
"""


def fetching(
    server: Faults, cache: PackageCache, wanted: Wanted
) -> AbstractContextManager[subprocess.Popen[bytes]]:
    rows = json.dumps([asdict(wheel) for wheel in wanted])
    argv = [sys.executable, "-c", _CHILD, str(cache.folder), server.url, rows]
    return child(argv, stderr=subprocess.PIPE)


@pytest.mark.parametrize("blow", [signal.SIGKILL, signal.SIGINT])
def test_killed_in_the_middle_and_run_again(
    server: Faults, cache: PackageCache, blow: signal.Signals
) -> None:
    size = 6_000_000
    wanted = offer(server, size)
    name, path = wanted[0].filename, cache.path(wanted[0])
    part = path.with_name(path.name + ".part")
    server.next[name] = ["held"]
    with fetching(server, cache, wanted) as process:

        def begun() -> bool:
            assert process.poll() is None, process.stderr and process.stderr.read()
            return part.exists() and part.stat().st_size >= 2_000_000

        wait_for(begun, "a third of the file has come")
        process.send_signal(blow)
        server.go_on.set()
        process.communicate(timeout=LIMIT)
    kept = part.stat().st_size
    assert 0 < kept < size  # it did not first wait for the rest of the file
    assert not path.exists()
    server.requests.clear()
    progress = Counted()
    assert whole(server, cache.fetch(wanted, locate(server), progress))
    assert server.requests == [(name, f"bytes={kept}-")]
    assert progress.done == progress.total == size - kept


def test_two_processes_fetch_each_file_once(server: Faults, cache: PackageCache) -> None:
    wanted = offer(server, 2_000_000, 1_000_000, 500)
    for wheel in wanted:
        server.next[wheel.filename] = ["slow"]
    with fetching(server, cache, wanted) as one, fetching(server, cache, wanted) as other:
        for process in (one, other):
            _, complaint = process.communicate(timeout=LIMIT)
            assert process.returncode == 0, complaint.decode()
    assert sorted(name for name, _ in server.requests) == [wheel.filename for wheel in wanted]
    assert whole(server, cache.fetch(wanted, never, QuietProgress()))
    left = {path.name for path in cache.folder.rglob("*") if path.is_file()}
    assert left == {".lock", *(wheel.filename for wheel in wanted)}


def test_a_part_that_another_process_finishes_between_two_looks(
    server: Faults, cache: PackageCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another build's `.part` becomes the file at any moment, and is then no longer there to be measured."""
    wanted = offer(server, 3000, 2000)
    paths = cache.fetch(wanted, lambda missing: locate(server)(missing), QuietProgress())
    found = Path.exists

    def finished(path: Path, **more: bool) -> bool:
        answer = found(path, **more)
        if path.suffix == ".part" and answer:
            path.replace(path.with_suffix(""))
        return answer

    for path in paths.values():
        path.rename(path.with_name(path.name + ".part"))
    monkeypatch.setattr(Path, "exists", finished)
    assert whole(server, cache.fetch(wanted, locate(server), QuietProgress()))


@pytest.mark.parametrize("seed", range(4))
def test_many_faults_in_any_order(server: Faults, cache: PackageCache, seed: int) -> None:
    """Whatever order faults come in, what is kept is right; at most three in a row for one file."""
    rng = random.Random(seed)
    wanted = offer(server, *(rng.randrange(1, 400_000) for _ in range(12)), seed=seed)
    words = ["503", "429", "reset", "close", "ignore-range", "wrong-range", "500", ""]
    for wheel in wanted:
        server.next[wheel.filename] = [rng.choice(words) for _ in range(3)]
    assert whole(server, cache.fetch(wanted, locate(server), QuietProgress()))
    assert not list(cache.folder.rglob("*.part"))


def test_retry_after_is_capped_and_waits_grow() -> None:
    retry_policy = RetryPolicy(first_wait=1.0, longest_wait=30.0)
    assert retry_policy.wait(1, 3600.0) == 30.0
    assert retry_policy.wait(1, 5.0) == 5.0
    assert 0.5 <= retry_policy.wait(1, None) <= 1.0
    assert 4.0 <= retry_policy.wait(4, None) <= 8.0
    assert retry_policy.wait(20, None) == 30.0


def test_credentials_go_to_the_indexs_own_host_alone(server: Faults) -> None:
    index = PackageIndex(
        url=server.url.replace("://", "://bob:p%40ss@") + "/simple",
        origin="",
        certificates="",
        proxy="",
        environment=(),
    )
    web = HttpSession(index)
    assert web._source.login(f"{server.url}/files/x.whl") == ("bob", "p@ss")
    assert web._source.login("http://127.0.0.2:80/files/x.whl") is None
    assert web._source.login(server.url.replace("http:", "https:") + "/x.whl") is None
    web.close()


def test_the_process_holds_no_lock_afterwards(server: Faults, cache: PackageCache) -> None:
    wanted = offer(server, 10)
    cache.fetch(wanted, locate(server), QuietProgress())
    with (cache.path(wanted[0]).parent / ".lock").open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_condas_archives_lie_beside_the_wheels(server: Faults, cache: PackageCache) -> None:
    """By their own address and name; a channel that wants a login is told of as such."""
    wheel = offer(server, 5000)[0]
    package = LockedCondaPackage(
        name="tiny", version="1.0", build="0", subdir="noarch", url="https://channel/noarch/tiny-1.0-0.conda",
        filename="tiny-1.0-0.conda", sha256=wheel.sha256, md5="", size=wheel.size, depends=(),
    )  # fmt: skip
    where = {package.filename: f"{server.url}/{wheel.filename}"}
    server.next[wheel.filename] = ["401"]
    with fails("download-rejected", message=("tiny 1.0: ", "401"), hint="credentials.json"):
        cache.fetch((package,), lambda _: where, QuietProgress())
    paths = cache.fetch((package,), lambda _: where, QuietProgress())
    assert paths[package] == cache.folder / "conda" / wheel.sha256[:2] / wheel.sha256 / package.filename
    assert paths[package].read_bytes() == server.files[wheel.filename]
    assert cache.missing((wheel, package)) == (wheel,)
