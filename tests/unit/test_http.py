"""HTTP: what ends although a server would go on for ever."""

from __future__ import annotations

import contextlib
import socket
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import requests
from hypothesis import given
from hypothesis import strategies as st

from imagefactory.http import (
    CHUNK,
    LOOPBACK,
    PRIVATE,
    PUBLIC,
    RESERVED,
    HttpSession,
    RejectedError,
    RetryPolicy,
    arriving,
    check_address,
    network_of,
    network_of_name,
    open_session,
    reachable_from,
    reaching,
    read_some,
    retry_after,
    sends_openly,
)
from tests.made.service import Answer, Request, service


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
    with pytest.raises(RejectedError, match="3 bytes in 87 seconds"):
        list(arriving(body, body.clock))  # type: ignore[arg-type]


def test_a_drip_after_a_quick_start_is_none_the_better() -> None:
    body = Body(iter([(1.0, bytes(CHUNK))] * 100 + [(20.0, b"x")] * 100))
    with pytest.raises(RejectedError, match="only"):
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
    with pytest.raises(RejectedError, match="longer than 1,000 bytes"):
        read_some(Body(drip(0.0, b"x" * 400)), 1000)  # type: ignore[arg-type]


@pytest.mark.parametrize("proxied", [False, True])
@pytest.mark.parametrize("head", ["status", "headers"])
def test_headers_without_end_are_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, head: str, proxied: bool
) -> None:
    """Each byte comes before its time-out. A server that stops by itself has not been cut off."""
    monkeypatch.setattr("imagefactory.http._SLOW_SECONDS", 0.01)
    monkeypatch.setattr("http.client._MAXHEADERS", 1 << 20)
    cut = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as server, open_session() as session:
        session.trust_env = False

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
    session = open_session()
    for before, after, goes in (
        ("https://a.example/x", "https://b.example/x", True),
        ("http://a.example/x", "http://b.example/x", False),
        ("http://a.example/x", "http://a.example/y", True),
    ):
        response = requests.Response()
        response.url, response.request = before, requests.Request("GET", before).prepare()
        request = session.prepare_request(requests.Request("GET", after))
        with reaching(None):
            session.rebuild_auth(request, response)
        assert ("Authorization" in request.headers) is goes


# --- where a request may go ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("network", "addresses"),
    [
        (PUBLIC, "8.8.8.8 2606:4700::1111 ::ffff:8.8.8.8 64:ff9b::808:808"),
        (
            PRIVATE,
            "10.0.0.1 172.16.0.1 192.168.1.1 100.64.0.1 fd00::1 fec0::1 ::ffff:10.0.0.1 64:ff9b::a00:1 "
            "64:ff9b:1::a00:1 2002:a00:1::",
        ),
        (LOOPBACK, "127.0.0.1 127.9.9.9 ::1 ::ffff:127.0.0.1 2002:7f00:1:: 64:ff9b::7f00:1"),
        (
            RESERVED,
            "169.254.169.254 fe80::1 fe80::1%eth0 0.0.0.0 0.0.0.1 :: 224.0.0.1 ff02::1 240.0.0.1 "
            "255.255.255.255 ::127.0.0.1 ::ffff:169.254.169.254",
        ),
    ],
)
def test_every_address_is_of_one_network(network: str, addresses: str) -> None:
    assert {address: network_of(address) for address in addresses.split()} == dict.fromkeys(
        addresses.split(), network
    )


@pytest.mark.parametrize(
    ("host", "network"),
    [
        ("localhost", LOOPBACK),
        ("A.LocalHost.", LOOPBACK),
        ("127.1", LOOPBACK),
        ("0x7f000001", LOOPBACK),
        ("2130706433", LOOPBACK),
        ("[::1]", LOOPBACK),
        ("0xa9fea9fe", RESERVED),
        ("10.1", PRIVATE),
        ("localhost.example.org", PUBLIC),
        ("a.example.org", PUBLIC),
    ],
)
def test_what_a_proxy_would_look_up_is_judged_by_its_name(host: str, network: str) -> None:
    assert network_of_name(host) == network


@pytest.mark.parametrize(
    ("networks", "may"),
    [
        ({PUBLIC}, {PUBLIC}),
        ({PRIVATE}, {PUBLIC, PRIVATE}),
        ({LOOPBACK}, {PUBLIC, LOOPBACK}),
        ({PUBLIC, PRIVATE}, {PUBLIC}),
        ({RESERVED}, {PUBLIC}),
    ],
)
def test_a_server_sends_to_its_own_network_and_to_the_public_one(networks: set[str], may: set[str]) -> None:
    assert reachable_from(networks) == may


@dataclass(frozen=True)
class Source:
    certificates: str = ""
    proxy: str = ""

    def login(self, url: str) -> None:
        return None


@pytest.fixture
def as_networks(monkeypatch: pytest.MonkeyPatch) -> None:
    """127.0.0.1 counts as public and 127.0.0.2 as private, as no test has others."""
    table = {"127.0.0.1": PUBLIC, "127.0.0.2": PRIVATE, "127.0.0.3": PRIVATE, "127.0.0.4": RESERVED}
    monkeypatch.setattr("imagefactory.http.network_of", lambda address: table[address])


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[list[str]]]:
    """What the name server answers for a name, in order; the last answer stays."""
    told: dict[str, list[list[str]]] = {}
    real = socket.getaddrinfo

    def look_up(host: str, port: int, *rest: object, **more: object) -> list[object]:
        answers = told.get(host)
        if not answers:
            return real(host, port, *rest, **more)  # type: ignore[arg-type]
        found = answers.pop(0) if len(answers) > 1 else answers[0]
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in found]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    return told


def redirects_to(url: str, status: int = 307) -> Callable[[Request], Answer]:
    return lambda _: (status, {"Location": url}, b"")


def fetch(url: str) -> bytes:
    web = HttpSession(Source(), retry_policy=RetryPolicy(attempts=1))
    try:
        with web.open(url) as response:
            return b"".join(arriving(response.raw))
    finally:
        web.close()


@pytest.mark.usefixtures("as_networks")
@pytest.mark.parametrize("inside", ["127.0.0.2", "127.0.0.4"])
def test_no_redirect_leads_from_a_public_server_inside(inside: str) -> None:
    with service(host=inside) as internal, service(redirects_to(f"http://{internal.address}/x")) as index:
        with pytest.raises(RejectedError):
            fetch(f"http://{index.address}/")
        assert (len(index.log), internal.log) == (1, [])
        if inside == "127.0.0.2":
            assert fetch(f"http://{internal.address}/") == b"{}"  # one that the user names is asked


@pytest.mark.usefixtures("as_networks")
def test_a_private_index_may_redirect_to_its_own_network_and_to_the_public_one() -> None:
    with service(host="127.0.0.3") as store, service() as mirror:
        for place in (store, mirror):
            with service(redirects_to(f"http://{place.address}/x"), host="127.0.0.2") as index:
                assert fetch(f"http://{index.address}/") == b"{}"


@pytest.mark.usefixtures("as_networks")
def test_a_way_out_is_no_way_back_in() -> None:
    with (
        service(host="127.0.0.2") as internal,
        service(redirects_to(f"http://{internal.address}/x")) as out,
        service(redirects_to(f"http://{out.address}/"), host="127.0.0.3") as index,
    ):
        with pytest.raises(RejectedError):
            fetch(f"http://{index.address}/")
        assert (len(out.log), internal.log) == (1, [])


@pytest.mark.usefixtures("as_networks")
def test_a_connection_of_the_pool_is_no_way_in() -> None:
    """It was opened for an address that the user named, and is still open."""
    with (
        service(host="127.0.0.2") as internal,
        service(redirects_to(f"http://{internal.address}/x")) as index,
    ):
        web = HttpSession(Source(), retry_policy=RetryPolicy(attempts=1))
        with web.open(f"http://{internal.address}/own") as response:
            list(arriving(response.raw))
        with pytest.raises(RejectedError), web.open(f"http://{index.address}/"):
            pass
        web.close()
        assert internal.asked == ["GET /own"]


@pytest.mark.usefixtures("as_networks")
@pytest.mark.parametrize(
    "answers",
    [
        pytest.param([["127.0.0.1", "127.0.0.2"]], id="one of several"),
        pytest.param([["127.0.0.2"]], id="inside"),
    ],
)
def test_every_address_of_a_name_is_checked(
    names: dict[str, list[list[str]]], answers: list[list[str]]
) -> None:
    names["two.example"] = answers
    with service() as open_, service(redirects_to(f"http://two.example:{open_.address[10:]}/")) as index:
        with pytest.raises(RejectedError):
            fetch(f"http://{index.address}/")
        assert open_.log == []


@pytest.mark.usefixtures("as_networks")
def test_the_address_that_was_checked_is_the_one_that_is_connected_to(
    names: dict[str, list[list[str]]],
) -> None:
    """A name server that says another address the next time is asked once."""
    names["rebind.example"] = [["127.0.0.1"], ["127.0.0.2"]]
    with (
        service() as outside,
        service(redirects_to(f"http://rebind.example:{outside.address[10:]}/")) as index,
    ):
        assert fetch(f"http://{index.address}/") == b"{}"
        assert len(outside.log) == 1
        assert outside.log[0].headers["Host"].startswith("rebind.example:")


def test_with_a_proxy_addresses_alone_are_judged() -> None:
    with service() as proxy:
        web = HttpSession(Source(proxy=f"http://{proxy.address}"), retry_policy=RetryPolicy(attempts=1))
        for place, may in (
            ("http://b.example/", True),
            ("http://10.0.0.1/", False),
            ("http://127.1/", False),
        ):
            proxy.log.clear()
            proxy.answer = lambda request, place=place: (
                (307, {"Location": place}, b"") if "a.example" in request.path else (200, {}, b"{}")
            )
            if may:
                with web.open("http://a.example/"):
                    pass
            else:
                with pytest.raises(RejectedError), web.open("http://a.example/"):
                    pass
            assert proxy.asked == ["GET http://a.example/", *([f"GET {place}"] if may else [])]
        web.close()


@pytest.mark.parametrize(
    "url",
    [
        *(
            "http://a\\@b/",
            "http://a\\\\@b/x",
            "http://[::1/",
            "http://a:99999999/",
            "http://a:b:c/",
            "http://a\t.b/",
        ),
        *("http://\u24c7egistry.example/", "http://a b/", "//a\\@b/"),
    ],
)
def test_an_address_of_two_hosts_is_refused(url: str) -> None:
    with pytest.raises(RejectedError):
        check_address(url)


@pytest.mark.parametrize(
    "url",
    [
        "https://A.example:443/x?y=z#f",
        "http://[::1]:5000/v2/",
        "https://me:pass%40word@a.example/simple/",
        "https://a.example",
        "http://127.0.0.1:1/x y/\u00fc",
        "https://a_b.example/%5C@c",
    ],
)
def test_an_address_of_one_host_is_taken(url: str) -> None:
    check_address(url)


def test_a_redirect_costs_no_more_than_its_head() -> None:
    """Its body is not read, and no cookie is kept or sent."""
    cookie = {"Set-Cookie": "a=" + "x" * 60_000}
    with service(lambda request: (200, cookie, b"{}")) as end:
        target = {"Location": f"http://{end.address}/", **cookie}
        with service(lambda _: (307, target, bytes(50_000_000))) as index:
            tracemalloc.start()
            web = HttpSession(Source(), retry_policy=RetryPolicy(attempts=1))
            for _ in range(2):
                with web.open(f"http://{index.address}/") as response:
                    assert read_some(response.raw, 10) == b"{}"
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
            web.close()
        assert peak < 60_000_000  # of which the service has 50
        assert not any("Cookie" in request.headers for request in (*index.log, *end.log))


@pytest.mark.parametrize(
    ("told", "seconds"),
    [
        ("3", 3.0),
        ("86400", 86400.0),
        ("Thu, 01 Jan 1970 00:00:10 GMT", 4.0),
        ("Thu, 01 Jan 1970 00:00:01 GMT", 0.0),
        *((text, None) for text in ("", "-5", "soon", "\xb2", "9" * 5000)),
    ],
)
def test_how_long_a_server_asks_to_wait(told: str, seconds: float | None) -> None:
    assert retry_after({"Retry-After": told, "Date": "Thu, 01 Jan 1970 00:00:06 GMT"}) == seconds
