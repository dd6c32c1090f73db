"""A list of a registry is read whole, or refused with the limit that it is beyond."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest

from imagefactory.errors import EXIT_REGISTRY, RegistryError
from imagefactory.http import RetryPolicy
from imagefactory.oci.manifests import INDEX_TYPE, MANIFEST_LIMIT, MANIFEST_TYPE
from imagefactory.oci.registry import session
from imagefactory.oci.registry.client import RegistryClient
from imagefactory.oci.registry.session import RegistryOptions
from tests.made.errors import fails
from tests.made.registry import Ways, registry_made_here
from tests.made.service import Answer, Request, Service, service
from tests.made.store_contract import artifact, image_manifest

DIGEST = f"sha256:{'a' * 64}"
PATIENCE = RetryPolicy(attempts=2, first_wait=0.001)


def open_at(served: Service, **options: object) -> RegistryClient:
    return RegistryClient(served.address, RegistryOptions(patience=PATIENCE, **options))  # type: ignore[arg-type]


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
        registry = RegistryClient(made.host, RegistryOptions(patience=PATIENCE))
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
        registry = RegistryClient(made.host, RegistryOptions(patience=PATIENCE))
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
            assert [len(registry.referrers("a/b", subject.digest, kind)) for kind in ("", *kinds)] == [
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
