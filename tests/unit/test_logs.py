"""Diagnostics show commands and requests, and never a secret."""

from __future__ import annotations

import logging
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from imagefactory.http import HttpSession, RetryPolicy
from imagefactory.logs import start_logging, stop_logging, without_secrets
from imagefactory.oci.credentials import Credential
from imagefactory.oci.registry.client import RegistryClient
from imagefactory.oci.registry.session import RegistryOptions
from tests.made.command import say
from tests.made.errors import fails
from tests.made.service import Answer, Request, service

SECRET = "hunter2-secret"


@pytest.fixture(autouse=True)
def stopped() -> Iterator[None]:
    yield
    stop_logging()


class Source:
    certificates = proxy = ""

    def login(self, url: str) -> tuple[str, str]:
        return "ann", SECRET


def test_a_request_is_logged_without_its_login_and_query(capsys: pytest.CaptureFixture[str]) -> None:
    start_logging(verbose=True)
    with service() as served, HttpSession(Source()) as web:
        web.request(f"http://ann:{SECRET}@{served.address}/simple/a?token={SECRET}", lambda r: r.raw.read())
        address = served.address
    out, err = capsys.readouterr()
    assert out == ""
    assert f"GET http://{address}/simple/a: 200, 2 bytes received, 0." in err
    assert SECRET not in err


def test_a_request_that_fails_is_logged(capsys: pytest.CaptureFixture[str]) -> None:
    start_logging(verbose=True)
    policy = RetryPolicy(attempts=1, connect=1.0)
    with HttpSession(Source(), retry_policy=policy) as web, pytest.raises(Exception, match="refused"):
        web.size("http://127.0.0.1:1/a")
    assert (
        "HEAD http://127.0.0.1:1/a: Failed to establish a new connection: [Errno 111] Connection refused"
        in capsys.readouterr().err
    )


def test_a_token_of_a_registry_is_not_logged(tmp_path: Path) -> None:
    def answer(request: Request) -> Answer:
        if "token" in request.path:
            return 200, {}, f'{{"token": "{SECRET}"}}'.encode()
        if "Authorization" not in request.headers:
            realm = f'Bearer realm="http://{request.headers["Host"]}/token",service="s"'
            return 401, {"WWW-Authenticate": realm}, b""
        return 200, {}, b'{"tags": ["a"]}'

    file = tmp_path / "log"
    start_logging(verbose=False, file=str(file))
    known = Credential(user="ann", secret="s3cret", origin="test")
    with service(answer) as served:
        registry = RegistryClient(served.address, RegistryOptions(credentials=lambda _: known))
        assert registry.tags("a") == ("a",)
        registry.close()
    text = file.read_text()
    assert [line.split(" imagefactory.http ")[1].split(":")[0] for line in text.splitlines()] == [
        "GET http"
    ] * 3
    assert SECRET not in text
    assert "s3cret" not in text


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (["docker", "build", "--build-arg", f"TOKEN={SECRET}"], "docker build --build-arg TOKEN=****"),
        (["x", f"--build-arg=KEY={SECRET}", "-e", f"A={SECRET}"], "x --build-arg=KEY=**** -e A=****"),
        (["sh", "-e", "script"], "sh -e script"),
        (["curl", "-H", f"Authorization: Bearer {SECRET}"], "curl -H Authorization: ****"),
        (["x", "--password", SECRET, "--token-file", "f"], "x --password **** --token-file ****"),
        (["x", f"--api-key={SECRET}", f"MY_SECRET={SECRET}"], "x --api-key=**** MY_SECRET=****"),
        (["git", "-c", f"http.extraHeader=Authorization: Basic {SECRET}"],
         "git -c http.extraHeader=Authorization: ****"),
        (["docker", "build", "--secret", "id=pip,src=/tmp/pip"], "docker build --secret ****"),
    ],
)  # fmt: skip
def test_a_command_hides_secrets(words: list[str], shown: str) -> None:
    assert " ".join(without_secrets(words)) == shown


def test_commands_are_logged_to_a_private_file_that_grows(tmp_path: Path) -> None:
    file = tmp_path / "log"
    for number in range(2):
        start_logging(verbose=False, file=str(file))
        arguments = [
            f"http://ann:{SECRET}@a.example/{number}?{SECRET}",
            "--build-arg",
            f"A={SECRET}",
            "\x1b[1m",
        ]
        subprocess.run([sys.executable, "-c", "", *arguments], check=True, cwd=tmp_path)
        stop_logging()
    lines = file.read_text().splitlines()
    end = f"'http://a.example/{{}} --build-arg 'A=****' '?[1m' (in {tmp_path})"
    assert [line.partition(" -c '' ")[2] for line in lines] == [end.format(0), end.format(1)]
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    subprocess.run([sys.executable, "-c", ""], check=True)
    assert len(file.read_text().splitlines()) == 2


def test_a_log_file_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    with fails("cannot-write-file"):
        start_logging(verbose=False, file=str(tmp_path))


def test_the_option_and_the_variable_start_logs(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("IMAGEFACTORY_LOG", str(tmp_path / "log"))
    assert say(capsys, "-v", "list").code == 0
    assert (tmp_path / "log").exists()
    assert logging.getLogger("imagefactory").handlers == []
