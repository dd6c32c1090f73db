"""What a registry says, as it is shown."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import requests
from hypothesis import given
from hypothesis import strategies as st

from imagefactory.errors import EXIT_REGISTRY, RegistryError
from imagefactory.http import PRIVATE, PUBLIC, RejectedError, RetryPolicy
from imagefactory.oci.credentials import Credential, anonymous
from imagefactory.oci.manifests import INDEX_TYPE, MANIFEST_LIMIT, MANIFEST_TYPE
from imagefactory.oci.registry import session
from imagefactory.oci.registry.client import RegistryClient
from imagefactory.oci.registry.session import RegistryOptions, RegistryRequest, TokenStore, parse_challenge
from tests.made.errors import fails
from tests.made.registry import Ways, registry_made_here
from tests.made.service import Answer, Request, Service, make_certificate, service
from tests.made.store_contract import artifact, blob, image_manifest, source

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
    retry_policy = RetryPolicy(attempts=2, first_wait=0.001)
    return RegistryClient(served.address, RegistryOptions(retry_policy=retry_policy, **options))  # type: ignore[arg-type]


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


DIGEST = f"sha256:{'a' * 64}"
PATIENCE = RetryPolicy(attempts=2, first_wait=0.001)


def open_at(served: Service, **options: object) -> RegistryClient:
    return RegistryClient(served.address, RegistryOptions(retry_policy=PATIENCE, **options))  # type: ignore[arg-type]


@contextmanager
def limited(monkeypatch: pytest.MonkeyPatch, **limits: float) -> Iterator[None]:
    with monkeypatch.context() as patch:
        patch.setattr(session, "LIMITS", replace(session.LIMITS, **limits))
        yield


def pages(rows: list[object], key: str = "manifests") -> tuple[list[int], object]:
    """How many pages were given, and what gives the same rows on every page, without an end."""
    number = itertools.count(1)
    given: list[int] = []

    def answer(request: Request) -> Answer:
        given.append(next(number))
        link = f'<{request.path.partition("?")[0]}?n={given[-1]}>; rel="next"'
        return 200, {"Link": link}, json.dumps({key: rows}).encode()

    return given, answer


def row(kind: str = "wanted", number: int = 0) -> dict[str, object]:
    digest = f"sha256:{number:064x}"
    return {"mediaType": MANIFEST_TYPE, "digest": digest, "size": 5, "artifactType": kind}


@pytest.mark.parametrize(
    ("limit", "value"), [("pages", 3), ("rows", 25), ("size", 4000), ("seconds", -1.0)], ids=str
)
@pytest.mark.parametrize("asked", ["tags", "referrers"])
def test_a_list_beyond_a_limit_is_an_error_and_never_cut(
    monkeypatch: pytest.MonkeyPatch, asked: str, limit: str, value: float
) -> None:
    rows = ["t" * 100] * 10 if asked == "tags" else [row() for _ in range(10)]
    given, answer = pages(rows, "tags" if asked == "tags" else "manifests")
    with service(answer) as served, limited(monkeypatch, **{limit: value}):  # type: ignore[arg-type]
        with pytest.raises(RegistryError) as caught:
            open_at(served).tags("a") if asked == "tags" else open_at(served).referrers("a", DIGEST)
        assert caught.value.exit_code == EXIT_REGISTRY
        assert str(int(abs(value)) if limit != "size" else "4,000") in caught.value.message
        assert len(given) <= 4


@pytest.mark.parametrize("server", [Ways(page=1)])
def test_a_list_that_fits_exactly_is_read(monkeypatch: pytest.MonkeyPatch, server: Ways) -> None:
    with registry_made_here(server) as made, limited(monkeypatch, pages=3, rows=3):
        registry = RegistryClient(made.host, RegistryOptions(retry_policy=PATIENCE))
        data = image_manifest(registry, "a/b", b"one")
        for tag in ("1", "2", "3"):
            registry.put_manifest("a/b", data, MANIFEST_TYPE, tag)
        assert registry.tags("a/b") == ("1", "2", "3")
        registry.put_manifest("a/b", data, MANIFEST_TYPE, "4")
        with pytest.raises(RegistryError):
            registry.tags("a/b")


def test_a_page_has_a_largest_size() -> None:
    page = b'{"tags": [' + b" " * MANIFEST_LIMIT + b"]}"
    with service(lambda _: (200, {}, page)) as served, pytest.raises(RegistryError):
        open_at(served).tags("a")


def test_pages_in_a_circle_are_an_error() -> None:
    def answer(request: Request) -> Answer:
        other = "1" if request.path.endswith("n=2") else "2"
        return 200, {"Link": f'</v2/a/referrers/x?n={other}>; rel="next"'}, b'{"manifests": []}'

    with service(answer) as served:
        with pytest.raises(RegistryError):
            open_at(served).referrers("a", DIGEST)
        assert len(served.log) == 3


def test_the_next_page_is_on_the_same_host() -> None:
    with service() as internal:
        for place in (f"http://{internal.address}/v2/x", "https://example.org/x", "file:///etc/passwd"):
            link = {"Link": f'<{place}>; rel="next"'}
            with service(lambda _, link=link: (200, link, b'{"tags": ["1"]}')) as served:
                with pytest.raises(RegistryError):
                    open_at(served).tags("a")
                assert len(served.log) == 1
        assert internal.log == []


@pytest.mark.parametrize("page", [b"[]", b"5", b'{"tags": {"1": 2}}', b'{"tags": "1"}', b"{}"])
def test_a_page_that_is_not_a_list_is_an_error(page: bytes) -> None:
    with service(lambda _: (200, {}, page)) as served, pytest.raises(RegistryError):
        open_at(served).tags("a")


def test_a_later_page_that_is_not_a_list_does_not_hide_the_first() -> None:
    def answer(request: Request) -> Answer:
        if request.path.endswith("n=2"):
            return 200, {}, b"{}"
        if "referrers" in request.path:
            body = json.dumps({"manifests": [row()]}).encode()
            return 200, {"Link": f'<{request.path}?n=2>; rel="next"'}, body
        return 404, {}, b""

    with service(answer) as served, pytest.raises(RegistryError):
        open_at(served).referrers("a", DIGEST)


def test_a_list_in_a_tag_is_not_looked_up_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("imagefactory.oci.registry.client.MOST_IN_TAG", 10)
    rows = [row("wanted" if number % 2 else "other", number) for number in range(10)]
    index: dict[str, object] = {"schemaVersion": 2, "mediaType": INDEX_TYPE, "manifests": rows}

    def answer(request: Request) -> Answer:
        if request.path.endswith(DIGEST.replace(":", "-")):
            return 200, {}, json.dumps(index).encode()
        return 404, {}, b""

    with service(answer) as served:
        registry = open_at(served)
        assert registry.referrers("a", DIGEST, "wanted") == ()
        assert len(served.log) == 2 + 10
        rows.append(row("wanted", 99))
        with pytest.raises(RegistryError):
            registry.referrers("a", DIGEST, "wanted")
        assert len(served.log) == 2 + 10 + 2


def test_the_manifests_say_what_a_tag_lists_not_the_tag() -> None:
    """GHCR has no referrers API, and its fallback lists call what cosign attached an empty config."""
    with registry_made_here(Ways(referrers=False)) as made:
        registry = RegistryClient(made.host, RegistryOptions(retry_policy=PATIENCE))
        subject = registry.put_manifest("a/b", image_manifest(registry, "a/b", b"one"), MANIFEST_TYPE, "1")
        kinds = ("application/vnd.ours", "application/vnd.theirs")
        for kind in kinds:
            registry.put_manifest("a/b", artifact(registry, "a/b", subject, kind, kind), MANIFEST_TYPE)
        tag = subject.digest.replace(":", "-")
        found = registry.manifest("a/b", tag)
        assert found is not None
        index = json.loads(found[1])
        for lie in ("application/vnd.oci.empty.v1+json", "application/vnd.theirs"):
            for one in index["manifests"]:
                one["artifactType"] = lie
            registry.put_manifest("a/b", json.dumps(index).encode(), INDEX_TYPE, tag)
            assert [
                len(registry.referrers("a/b", subject.digest, *chosen))
                for chosen in ((), kinds[:1], kinds[1:])
            ] == [
                2,
                1,
                1,
            ]
        again = artifact(registry, "a/b", subject, kinds[0], "another")
        registry.put_manifest("a/b", again, MANIFEST_TYPE)
        assert len(registry.referrers("a/b", subject.digest)) == 3


def test_a_link_without_brackets_is_followed_and_no_other_is_passed_by() -> None:
    """As an old Quay wrote it."""

    def answer(request: Request) -> Answer:
        if "last=b" in request.path:
            return 200, {}, b'{"tags": ["c"]}'
        return 200, {"Link": '/v2/a/tags/list?n=50&last=b; rel="next"'}, b'{"tags": ["a", "b"]}'

    with service(answer) as served:
        assert open_at(served).tags("a") == ("a", "b", "c")
    for link in ('rel="next"', '<>; rel="next"', '</x y; rel="next"'):
        header = {"Link": link}
        with (
            service(lambda _, header=header: (200, header, b'{"tags": ["a"]}')) as served,
            fails("registry-request-failed", "Link"),
        ):
            open_at(served).tags("a")


_CHILD = """
import resource, sys
from imagefactory.errors import RegistryError
from imagefactory.oci.registry.client import RegistryClient
registry = RegistryClient(sys.argv[1])
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    print(len(registry.referrers("a", "sha256:" + "a" * 64, sys.argv[2])))
except RegistryError as error:
    print("refused")
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) >> 10)
"""


@pytest.mark.parametrize(
    ("page", "bound"),
    [
        pytest.param({"manifests": [row("other", n) for n in range(18_000)]}, 80, id="other referrers"),
        pytest.param({"manifests": [row("wanted", n) for n in range(18_000)]}, 250, id="wanted referrers"),
        pytest.param({"manifests": [[]] * 1_000_000}, 200, id="small values"),
        pytest.param(
            {"manifests": [{**row(), "annotations": {f"{n:04}": "" for n in range(250_000)}}]},
            250,
            id="annotations",
        ),
    ],
)
def test_pages_without_end_take_little_memory(page: object, bound: int) -> None:
    """MiB in a process of its own; before there were limits, a thousand of these took gigabytes."""
    data, number = json.dumps(page, separators=(",", ":")).encode(), itertools.count()
    assert len(data) <= MANIFEST_LIMIT

    def answer(request: Request) -> Answer:
        return 200, {"Link": f'</v2/a/referrers/x?n={next(number)}>; rel="next"'}, data

    with service(answer) as served:
        run = [sys.executable, "-c", _CHILD, served.address, "wanted"]
        said, grown = subprocess.run(run, capture_output=True, text=True, check=True).stdout.split()
    assert said == "refused"
    assert int(grown) < bound


LOGIN = Credential(user="ann", secret="s3cret", origin="config.json")


class Talk:
    """What was said and asked, in the order in which it happened."""

    def __init__(self, host: str, credential: Credential | None, *plain: str) -> None:
        self.lines: list[str] = []
        options = RegistryOptions(
            credentials=(lambda _: credential) if credential else anonymous,
            plain_hosts=plain,
            tell=lambda text: self.lines.append(f"said: {text}"),
        )
        self.tokens = TokenStore(host, options, plain=bool(plain), fetch=self.fetch)

    def fetch(self, ask: RegistryRequest, signed: str) -> bytes:
        self.lines.append(f"asked: {ask.url.partition('?')[0]} {'with' if signed or ask.body else 'without'}")
        return b'{"token": "t"}'

    def renew(self, realm: str, scope: str = "repository:a:pull") -> None:
        header = f'Bearer realm="{realm}",service="x"'
        self.tokens.renew((scope,), header, "")


@pytest.mark.parametrize(
    "credential", [LOGIN, Credential(user="", secret="identity", origin="config.json")], ids=str
)
def test_a_credential_for_another_host_is_told_before_it_goes_and_once(credential: Credential) -> None:
    talk = Talk("registry.example.org:5000", credential)
    talk.renew("https://tokens.example.net/t")
    talk.renew("https://tokens.example.net/t", "repository:b:pull")
    assert talk.lines == [
        "said: registry.example.org:5000 has its tokens issued by tokens.example.net: "
        "the credentials from config.json are sent there",
        "asked: https://tokens.example.net/t with",
        "asked: https://tokens.example.net/t with",
    ]


@pytest.mark.parametrize(
    ("host", "realm"),
    [
        ("Registry.example.org:5000", "https://registry.example.org/token"),
        ("[::1]:5000", "https://[::1]:5001/token"),
        ("docker.io", "https://auth.docker.io/token"),
        ("registry.gitlab.com", "https://gitlab.com/jwt/auth"),
    ],
)
def test_its_own_host_and_known_pairs_need_no_word(host: str, realm: str) -> None:
    talk = Talk(host, LOGIN)
    talk.renew(realm)
    assert talk.lines == [f"asked: {realm} with"]


def test_without_a_credential_nothing_is_given_away() -> None:
    talk = Talk("registry.example.org", None)
    talk.renew("https://tokens.example.net/t")
    assert talk.lines == ["asked: https://tokens.example.net/t without"]


@pytest.mark.parametrize(
    "realm", ["https://auth.docker.io.example.net/token", "https://evil.example/auth.docker.io"]
)
def test_a_name_that_looks_like_a_known_one_is_told(realm: str) -> None:
    talk = Talk("docker.io", LOGIN)
    talk.renew(realm)
    assert talk.lines[0].startswith("said: docker.io has its tokens issued by ")


@pytest.mark.parametrize(
    ("realm", "goes"),
    [
        ("http://registry.example.org:5000/token", True),
        ("http://tokens.example.org/token", True),
        ("http://127.0.0.1:5001/token", True),
        ("https://other.example.net/token", True),
        ("http://other.example.net/token", False),
        ("http://registry.example.org:5001/token", False),
        ("http://registry.example.org:5000@other.example.net/token", False),
    ],
)
def test_without_encryption_a_password_goes_only_where_the_user_said(realm: str, goes: bool) -> None:
    talk = Talk("registry.example.org:5000", LOGIN, "registry.example.org:5000", "tokens.example.org")
    if goes:
        talk.renew(realm)
        assert talk.lines[-1].endswith(" with")
        return
    with pytest.raises(RejectedError):
        talk.renew(realm)
    assert talk.lines == []
