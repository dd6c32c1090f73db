"""A night is posted as JSON, and its numbers are written for Prometheus."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from imagefactory.access import Access
from imagefactory.actions.read_catalog import cache_published, cached_expiry
from imagefactory.errors import CheckFailedError, UsageError
from imagefactory.extras.nightly.changes import NightlyRow
from imagefactory.extras.nightly.nights import post_json, read_address
from imagefactory.extras.nightly.view import format_metrics
from imagefactory.http import RetryPolicy
from imagefactory.project import Project
from imagefactory.settings.load import load_settings
from imagefactory.trust.catalog import LIFE, sign_catalog
from imagefactory.trust.claims import VerdictAges
from tests.made.catalog import make_catalog
from tests.made.command import Call
from tests.made.night import night_report
from tests.made.trusted import write_settings
from tests.made.verdicts import LAB, LAB_ROW

PATIENCE = RetryPolicy(attempts=2, first_wait=0.0)
SAMPLE = re.compile(r'([a-z_]+)\{registry="([^"]*)"(?:,kind="([a-z]+)")?\} (-?[0-9]+)')


@dataclass
class Taker:
    """An HTTP service of this machine: what it got, and what it answers, the last one for good."""

    answers: list[int] = field(default_factory=lambda: [204])
    got: list[tuple[str, str, Any]] = field(default_factory=list)
    url: str = ""


@pytest.fixture
def taker() -> Iterator[Taker]:
    taken = Taker()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            taken.got.append((self.path, self.headers["Content-Type"], body))
            code = taken.answers.pop(0) if len(taken.answers) > 1 else taken.answers[0]
            self.send_response(code)
            self.send_header("Location", "/elsewhere")
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        taken.url = f"http://127.0.0.1:{server.server_port}/hook/s3cret?key=k3y"
        yield taken
        server.shutdown()


@pytest.fixture
def access(tmp_path: Path) -> Access:
    environ = {"HOME": str(tmp_path), "XDG_CONFIG_DIRS": str(tmp_path)}
    return Access(settings=load_settings(directory=None, start=tmp_path, environ=environ), environ=environ)


def test_one_post_and_what_may_pass_is_tried_again(taker: Taker, access: Access) -> None:
    taker.answers = [503, 204]
    post_json(access, taker.url, {"format": "imagefactory.nightly/1"}, PATIENCE)
    assert (
        taker.got == [("/hook/s3cret?key=k3y", "application/json", {"format": "imagefactory.nightly/1"})] * 2
    )


@pytest.mark.parametrize(("answer", "posts"), [(404, 1), (302, 1), (503, 2)])
def test_what_nobody_takes_is_an_error_without_the_secret(
    taker: Taker, access: Access, answer: int, posts: int
) -> None:
    taker.answers = [answer]
    with pytest.raises(CheckFailedError, match=str(answer)) as caught:
        post_json(access, taker.url, {}, PATIENCE)
    assert (caught.value.code, len(taker.got)) == ("webhook-failed", posts)
    assert not {"s3cret", "k3y"} & set(re.split(r"\W+", caught.value.message + caught.value.hint))


def test_a_service_that_is_not_there_is_named_without_the_secret(access: Access) -> None:
    with pytest.raises(CheckFailedError, match=r"127\.0\.0\.1:1 ") as caught:
        post_json(access, "http://127.0.0.1:1/hook/s3cret", {}, PATIENCE)
    assert (caught.value.code, "s3cret" in caught.value.message) == ("webhook-failed", False)


def test_an_address_may_be_in_a_file(tmp_path: Path) -> None:
    path = tmp_path / "hook"
    path.write_text("https://chat.example.org/s3cret\n")
    assert read_address(str(path)) == "https://chat.example.org/s3cret"
    assert read_address("http://localhost:8080/x") == "http://localhost:8080/x"


@pytest.mark.parametrize(
    "given",
    ["http://chat.example.org/s3cret", "ftp://a/s3cret", "https://", "https://a\\@b/s3cret", "s3cret"],
)
def test_any_other_is_refused_and_not_repeated(given: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        read_address(given)
    assert caught.value.code == ("webhook-invalid" if "://" in given else "cannot-read-file")
    assert "://" not in given or "s3cret" not in caught.value.message + caught.value.hint


def test_a_night_that_cannot_be_is_posted_too(call: Call, factory: Project, taker: Taker) -> None:
    root = factory.settings.root_path
    assert call("site", "nightly", "--webhook", taker.url, root=root).code == 2
    ((_, _, body),) = taker.got
    assert (body["format"], body["errors"][0]["exit_code"]) == ("imagefactory.error/1", 2)


def test_metrics_are_gauges_with_help_and_type() -> None:
    start = datetime(2026, 11, 26, 2, 17, tzinfo=UTC)
    night = night_report(
        started=start,
        ended=start + timedelta(hours=1),
        place='reg.example.org/g"pu',
        built=(),
        verified=(NightlyRow(what="a"), NightlyRow(what="b")),
        broken=(NightlyRow(what="c", exit_code=7),),
        due=(),
        verdict_ages=VerdictAges(oldest=start, expiring=3),
    )
    text = format_metrics(night, start + LIFE)
    found = {}
    for block in text.split("# HELP ")[1:]:
        name, _, rest = block.partition(" ")
        lines = rest.splitlines()[1:]
        assert lines[0] == f"# TYPE {name} gauge"
        for line in lines[1:]:
            sample = SAMPLE.fullmatch(line.replace('\\"', ""))
            assert sample, line
            assert (sample[1], sample[2]) == (name, "reg.example.org/gpu")
            found[name.removeprefix("imagefactory_"), sample[3]] = int(sample[4])
    began = int(start.timestamp())
    assert found == {
        ("night_start_timestamp_seconds", None): began,
        ("night_end_timestamp_seconds", None): began + 3600,
        ("night_exit_code", None): 7,
        ("night_rows", "broken"): 1,
        ("night_rows", "built"): 0,
        ("night_rows", "verified"): 2,
        ("night_rows", "due"): 0,
        ("verdicts_expiring", None): 3,
        ("verdict_oldest_timestamp_seconds", None): began,
        ("catalog_expires_timestamp_seconds", None): began + 30 * 86400,
    }
    assert "catalog_expires" not in format_metrics(night, None)


def test_the_expiry_is_that_of_the_newest_signed_catalog(tmp_path: Path) -> None:
    environ = {"HOME": str(tmp_path / "home"), "XDG_CONFIG_DIRS": str(tmp_path / "none")}
    write_settings(tmp_path, f'registry = "reg.example.org/gpu"\n{LAB_ROW}', environ)
    settings = load_settings(directory=tmp_path, start=tmp_path, environ=environ)
    assert cached_expiry(settings) is None
    catalog = make_catalog()
    cache_published(settings, "reg.example.org/gpu", sign_catalog(catalog, LAB), catalog.created)
    assert cached_expiry(settings) == catalog.expires  # long ago or not
