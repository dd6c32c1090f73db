"""HTTP: what ends although a server would go on for ever."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import requests
from hypothesis import given
from hypothesis import strategies as st

from imagefactory.web import (
    CHUNK,
    RefusedError,
    _careful_session,
    arriving,
    mount_timely,
    read_some,
    sends_openly,
)


@dataclass(slots=True)
class Body:
    """An answer whose pieces come after so many seconds each."""

    pieces: Iterator[tuple[float, bytes]]
    now: float = 0.0
    asked: list[int] = field(default_factory=list)

    def read1(self, amount: int, decode_content: bool) -> bytes:
        assert not decode_content
        self.asked.append(amount)
        seconds, data = next(self.pieces, (0.0, b""))
        self.now += seconds
        return data

    def clock(self) -> float:
        return self.now


def drip(seconds: float, data: bytes) -> Iterator[tuple[float, bytes]]:
    while True:
        yield seconds, data


def test_a_byte_now_and_then_is_not_waited_for_without_end() -> None:
    body = Body(drip(29.0, b"x"))
    with pytest.raises(RefusedError, match="only 3 bytes came in 87 seconds"):
        list(arriving(body, body.clock))  # type: ignore[arg-type]


def test_a_drip_after_a_quick_start_is_none_the_better() -> None:
    body = Body(iter([(1.0, bytes(CHUNK))] * 100 + [(20.0, b"x")] * 100))
    with pytest.raises(RefusedError, match="only"):
        list(arriving(body, body.clock))  # type: ignore[arg-type]
    assert body.now < 250


@given(st.lists(st.tuples(st.floats(0.0, 29.0), st.integers(30_000, CHUNK)), max_size=50))
def test_a_slow_network_is_borne(pieces: list[tuple[float, int]]) -> None:
    body = Body((seconds, bytes(size)) for seconds, size in pieces)
    assert sum(map(len, arriving(body, body.clock))) == sum(size for _, size in pieces)  # type: ignore[arg-type]
    assert set(body.asked) == {CHUNK}


def test_time_that_the_reader_takes_is_not_the_servers() -> None:
    body = Body(iter([(1.0, b"x")] * 20))
    for _ in arriving(body, body.clock):  # type: ignore[arg-type]
        body.now += 3600


def test_a_short_answer_has_a_bound() -> None:
    assert read_some(Body(iter([(0.0, b"ab"), (0.0, b"c")])), 3) == b"abc"  # type: ignore[arg-type]
    with pytest.raises(RefusedError, match="longer than 1,000 bytes"):
        read_some(Body(drip(0.0, b"x" * 400)), 1000)  # type: ignore[arg-type]


@pytest.mark.parametrize("proxied", [False, True])
@pytest.mark.parametrize("head", ["status", "headers"])
def test_headers_without_end_are_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, head: str, proxied: bool
) -> None:
    """Each byte comes before its time-out. A server that stops by itself has not been cut off."""
    monkeypatch.setattr("imagefactory.web._SLOW_SECONDS", 0.01)
    monkeypatch.setattr("http.client._MAXHEADERS", 1 << 20)
    cut = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as server, requests.Session() as session:
        session.trust_env = False
        mount_timely(session)

        def serve() -> None:
            with server.accept()[0] as connection:
                connection.recv(65536)
                connection.sendall(b"HTTP/1.1 200 " + (b"OK\r\n" if head == "headers" else b""))
                connection.settimeout(0.01)
                try:
                    for _ in range(2000):
                        with contextlib.suppress(TimeoutError):
                            if connection.recv(1) == b"":
                                break
                        connection.sendall(b"a: b\r\n" if head == "headers" else b"a")
                    else:
                        return
                except OSError:
                    pass
                cut.set()

        threading.Thread(target=serve, daemon=True).start()
        here = f"http://127.0.0.1:{server.getsockname()[1]}/"
        proxies = {"http": here} if proxied else {}
        with pytest.raises((requests.ConnectionError, requests.Timeout)):
            session.get("http://example.org/" if proxied else here, proxies=proxies, timeout=0.5)
        assert cut.wait(60)


# --- passwords without TLS ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "openly"),
    [
        ("https://any.example/x", False),
        ("http://127.0.0.1:8/x", False),
        ("http://127.3.2.1/x", False),
        ("http://[::1]:8/x", False),
        ("http://localhost/x", False),
        ("http://127.evil.example/x", True),
        ("http://localhost.evil.example/x", True),
        ("http://mirror.example:8080/other", False),
        ("http://mirror.example:8081/simple", True),
        ("http://mirror.example/simple", True),
        ("http://mirror.example:8080@evil.example/simple", True),
        ("ftp://mirror.example:8080/x", True),
    ],
)
def test_a_password_goes_openly_only_where_the_user_said(url: str, openly: bool) -> None:
    assert sends_openly(url, ("http://mirror.example:8080/simple",)) is openly


def test_a_redirect_without_tls_gets_no_password(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """requests itself asks netrc again for each host that it is led to."""
    netrc = tmp_path / "netrc"
    netrc.write_text("default login ann password hunter2\n")
    netrc.chmod(0o600)
    monkeypatch.setenv("NETRC", str(netrc))
    session = _careful_session()
    for before, after, goes in (
        ("https://a.example/x", "https://b.example/x", True),
        ("https://a.example/x", "http://a.example/x", False),
        ("http://a.example/x", "http://b.example/x", False),
        ("http://a.example/x", "http://a.example/y", True),
    ):
        response = requests.Response()
        response.url, response.request = before, requests.Request("GET", before).prepare()
        request = session.prepare_request(requests.Request("GET", after))
        session.rebuild_auth(request, response)
        assert ("Authorization" in request.headers) is goes
