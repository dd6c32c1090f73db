"""What a registry says, as it is shown."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import requests
from hypothesis import given
from hypothesis import strategies as st

from imagefactory.errors import EXIT_REGISTRY, RegistryError
from imagefactory.http import PRIVATE, PUBLIC, RejectedError, RetryPolicy
from imagefactory.oci.credentials import Credential
from imagefactory.oci.registry.client import RegistryClient
from imagefactory.oci.registry.session import RegistryOptions, RegistryRequest, parse_challenge
from tests.made.service import Answer, Request, Service, make_certificate, service
from tests.made.store_contract import blob, source

SESSION = RegistryClient("box.example").session


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        ("x" * 300, "x" * 300),
        ("x" * 301, "x" * 300 + " ..."),
        ("one\ntwo\t\x1b[31mthree", "one two [31mthree"),
        ("GET https://ann:word@box.example/v2/a?sig=abc failed", "GET https://box.example/v2/a failed"),
        ("is it there?", "is it there?"),
    ],
)
def test_one_line_of_a_fair_length_without_credentials(said: str, shown: str) -> None:
    assert SESSION._clean(said) == shown


@given(st.text(max_size=400))
def test_whatever_is_said_is_one_printable_line(said: str) -> None:
    shown = SESSION._clean(said)
    assert shown.isprintable()
    assert len(shown) <= 304


def test_a_secret_within_a_secret_leaves_nothing_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SESSION._tokens, "secrets", {"word", "sword-fish"}, raising=False)
    assert SESSION._clean("sword-fish, word") == "***, ***"


# --- where a registry may send a request -----------------------------------------------------------

SMALL_BLOB, LARGE_BLOB = b"small", b"x" * (2 << 20)
KNOWN = Credential(user="ann", secret="s3cret", origin="the test")


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return make_certificate(tmp_path_factory.mktemp("tls"))


@pytest.fixture
def as_networks(monkeypatch: pytest.MonkeyPatch) -> None:
    """127.0.0.1 counts as public and the others as private, as no test has others."""
    monkeypatch.setattr("imagefactory.http.network_of", lambda at: PUBLIC if at == "127.0.0.1" else PRIVATE)


def client(served: Service, **options: object) -> RegistryClient:
    patience = RetryPolicy(attempts=2, first_wait=0.001)
    return RegistryClient(served.address, RegistryOptions(patience=patience, **options))  # type: ignore[arg-type]


def names(location: str) -> Callable[[Request], Answer]:
    """A registry that has no blob and gives `location` for an upload."""

    def answer(request: Request) -> Answer:
        if request.method == "POST":
            return 202, {"Location": location}, b""
        return 404, {}, b""

    return answer


@pytest.mark.parametrize("data", [SMALL_BLOB, LARGE_BLOB], ids=["PUT", "PATCH"])
@pytest.mark.parametrize("status", [202, 307, 308])
def test_no_upload_goes_to_another_service_of_this_machine(data: bytes, status: int) -> None:
    with service() as internal:
        target = f"http://{internal.address}/_shutdown"
        with service(names(target)) as served:
            if status != 202:  # a redirect of the upload itself
                served.answer = lambda request: (
                    (202, {"Location": "/v2/a/blobs/uploads/1"}, b"")
                    if request.method == "POST"
                    else (status, {"Location": target}, b"")
                    if request.method in ("PUT", "PATCH", "DELETE")
                    else (404, {}, b"")
                )
            with pytest.raises(RegistryError) as caught:
                client(served).write("a", blob(data), source(data))
            assert caught.value.exit_code == EXIT_REGISTRY
        assert internal.log == []


def test_an_upload_that_ends_deletes_nothing_elsewhere() -> None:
    with service() as internal, service(names(f"http://{internal.address}/data")) as served:
        assert not client(served).mount("a", blob(SMALL_BLOB), "b")
        assert internal.log == []


def test_a_location_of_its_own_is_taken() -> None:
    def answer(request: Request) -> Answer:
        if request.method == "POST":
            return 202, {"Location": f"http://{request.headers['Host']}/v2/a/blobs/uploads/1"}, b""
        done = any(one.method == "PUT" for one in served.log)
        if request.method == "PUT":
            return 201, {}, b""
        return (200, {}, SMALL_BLOB) if done else (404, {}, b"")

    with service(answer) as served:
        assert client(served).write("a", blob(SMALL_BLOB), source(SMALL_BLOB)) == len(SMALL_BLOB)


@pytest.mark.usefixtures("as_networks")
def test_a_public_registry_may_upload_to_a_public_store_by_https_without_credentials(
    certificate: tuple[Path, Path],
) -> None:
    with service(lambda _: (201, {}, b""), tls=certificate) as store:

        def answer(request: Request) -> Answer:
            if "Authorization" not in request.headers:
                return 401, {"WWW-Authenticate": "Basic realm=x"}, b""
            if request.method == "POST":
                return 202, {"Location": f"https://{store.address}/upload?sig=x"}, b""
            return (200, {}, SMALL_BLOB) if store.log else (404, {}, b"")

        with service(answer, tls=certificate) as served:
            options = {"certificates": certificate[0], "loopback_plain": False}
            registry = client(served, credentials=lambda _: KNOWN, **options)
            assert registry.write("a", blob(SMALL_BLOB), source(SMALL_BLOB)) == len(SMALL_BLOB)
        assert [request.method for request in store.log] == ["PUT"]
        assert "Authorization" not in store.log[0].headers


@pytest.mark.usefixtures("as_networks")
@pytest.mark.parametrize("what", ["Location", "redirect", "Link", "realm"])
@pytest.mark.parametrize("place", ["http://127.0.0.1:{plain}/x", "https://127.0.0.2:{inside}/x"])
def test_nothing_that_a_registry_names_leads_out_of_https_or_inside(
    certificate: tuple[Path, Path], what: str, place: str
) -> None:
    with service() as plain, service(host="127.0.0.2", tls=certificate) as inside:
        ports = {"plain": plain.address.split(":")[1], "inside": inside.address.split(":")[1]}
        url = place.format(**ports)
        answers: dict[str, Callable[[Request], Answer]] = {
            "Location": names(url),
            "redirect": lambda _: (307, {"Location": url}, b""),
            "Link": lambda _: (200, {"Link": f'<{url}>; rel="next"'}, b'{"tags": []}'),
            "realm": lambda _: (401, {"WWW-Authenticate": f'Bearer realm="{url}",service="s"'}, b""),
        }
        with service(answers[what], tls=certificate) as served:
            options = {"certificates": certificate[0], "loopback_plain": False}
            registry = client(served, credentials=lambda _: KNOWN, **options)
            upload = blob(SMALL_BLOB), source(SMALL_BLOB)
            with pytest.raises(RegistryError):
                registry.write("a", *upload) if what == "Location" else registry.tags("a")
            assert served.log != []
        assert (plain.log, inside.log) == ([], [])


@pytest.mark.usefixtures("as_networks")
def test_a_name_of_its_own_that_leads_inside_later_is_no_way_in(certificate: tuple[Path, Path]) -> None:
    """One that answered from the public network stays there, whatever address it has the next time."""
    session = RegistryClient("box.example").session
    session._networks |= {PRIVATE, PUBLIC}
    with service(host="127.0.0.2", tls=certificate) as inside:
        ask = RegistryRequest(method="GET", url=f"https://{inside.address}/", scope=())
        with pytest.raises(RejectedError), session.answer(ask):
            pass
        assert inside.log == []


def test_an_answer_from_elsewhere_asks_for_no_password() -> None:
    challenge = {"WWW-Authenticate": "Basic realm=x"}
    with (
        service(lambda _: (401, challenge, b"")) as elsewhere,
        service(lambda _: (307, {"Location": f"http://{elsewhere.address}/x"}, b"")) as served,
    ):
        with pytest.raises(RegistryError):
            client(served, credentials=lambda _: KNOWN).tags("a")
        assert len(served.log) == len(elsewhere.log) == 1
        assert "Authorization" not in elsewhere.log[0].headers


def test_an_identity_token_is_not_posted_to_another_service() -> None:
    known = Credential(user="", secret="identity", origin="the test")
    with service(lambda _: (200, {}, b'{"token": "t"}')) as other:
        challenge = {"WWW-Authenticate": f'Bearer realm="http://{other.address}/t",service="s"'}
        with service(lambda _: (401, challenge, b"")) as served, pytest.raises(RegistryError):
            client(served, credentials=lambda _: known).tags("a")
        assert other.log == []


@pytest.mark.parametrize(
    "trick",
    [
        "http://{evil}\\@{own}/x",
        "http://{evil}\\\\@{own}/x",
        "http://{evil}#@{own}/x",
        "http://{evil}?@{own}/x",
    ],
)
def test_an_address_that_reads_as_two_hosts_gets_no_password(trick: str) -> None:
    """What requests connects to and what decides on the credential are two parsers of addresses."""
    with service(lambda _: (201, {}, b"")) as evil:

        def answer(request: Request) -> Answer:
            if "Authorization" not in request.headers:
                return 401, {"WWW-Authenticate": "Basic realm=x"}, b""
            place = trick.format(evil=evil.address, own=request.headers["Host"])
            return (202, {"Location": place}, b"") if request.method == "POST" else (404, {}, b"")

        upload = blob(SMALL_BLOB), source(SMALL_BLOB)
        with service(answer) as served, pytest.raises(RegistryError):
            client(served, credentials=lambda _: KNOWN).write("a", *upload)
        assert evil.log == []


@pytest.mark.parametrize(
    "link",
    [
        pytest.param("<" * 1_000_000, id="many beginnings"),
        pytest.param("<a>;" * 250_000, id="many links"),
        '<https://[::1>; rel="next"',
        '<https://a:99999999/>; rel="next"',
        '<http://[a]/>; rel="next"',
    ],
)
def test_no_header_is_a_bug_or_an_hours_work(link: str) -> None:
    """http.client takes 100 of 64 KiB, which arrive as one."""
    session = RegistryClient("box.example").session
    response = requests.Response()
    response.url, response.headers["Link"] = "https://box.example/v2/a/tags/list", link
    with pytest.raises((RejectedError, ValueError)):
        session._following(response)
    assert parse_challenge("Bearer " + "a=b " * 1_000_000) is None
