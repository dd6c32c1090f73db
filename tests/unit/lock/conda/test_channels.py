"""Conda channels: where they are asked, with what, and what is said when they do not answer."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from imagefactory.errors import UsageError, extra_hint, redact
from imagefactory.http import HttpSession, RejectedError, RetryPolicy, without_login
from imagefactory.lock.conda.channels import ChannelAccess, find_channels
from imagefactory.lock.conda.solver import CondaSolver, first_question, name_of, run
from imagefactory.recipes.values import CHANNEL_ROOT, channel_address
from imagefactory.settings.load import load_settings
from tests.made.errors import fails
from tests.made.solving import target
from tests.made.trusted import write_settings
from tests.services.channels import (
    ChannelOptions,
    ChannelServer,
    Fault,
    channel_server,
    record,
    write_channel,
)

FORGE = f"{CHANNEL_ROOT}/conda-forge"
QUICK = RetryPolicy(attempts=2, first_wait=0.01, longest_wait=0.02)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_channel(tmp_path / "all/conda-forge", record("python", "3.11.9"), record("numpy", "2.0", "python"))
    return tmp_path / "all"


@pytest.fixture
def server(folder: Path) -> Iterator[ChannelServer]:
    with channel_server(folder) as server:
        yield server


def solve(channels: ChannelAccess, cache: Path, *names: str) -> dict[str, str]:
    """Name -> true address of what the solver finds."""
    asked = target("numpy", channels=tuple(map(channel_address, names or ("conda-forge",))))
    solver = CondaSolver(asked, channels, channels.gateway(cache))
    return {name_of(one): solver.true_address(one) for one in run(solver.solve(first_question(asked)))}


# --- settings ------------------------------------------------------------------------------------


def test_the_table_and_the_variable_say_the_same(tmp_path: Path) -> None:
    (tmp_path / "local").mkdir()
    text = '[channels]\n"conda-forge" = "https://mirror.example/forge"\n"lab" = "local"\n'
    write_settings(tmp_path, text, {"HOME": str(tmp_path)})
    from_file = load_settings(directory=tmp_path, start=tmp_path, environ={"HOME": str(tmp_path)})
    assert from_file.channels.value == f"conda-forge=https://mirror.example/forge,lab={tmp_path}/local"
    given = {"HOME": str(tmp_path), "IMAGEFACTORY_CHANNELS": from_file.channels.value}
    from_variable = load_settings(directory=None, start=Path("/"), environ=given)
    assert from_variable.channels.value == from_file.channels.value
    assert from_variable.channels.origin == "$IMAGEFACTORY_CHANNELS"


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("conda-forge", "is not CHANNEL=ADDRESS"),
        ("conda-forge=ftp://mirror.example/x", "is not CHANNEL=ADDRESS"),
        ("conda forge=https://mirror.example", "is not CHANNEL=ADDRESS"),
        ("a=https://one.example,a=https://two.example", "appears twice"),
        ("a=https://one.example,https://conda.anaconda.org/a=https://two.example", "appears twice"),
        ("a=/no/such/folder", "/no/such/folder"),
        ("a=https://ann:hunter2@mirror.example", "channels"),
        ("a=https://mirror.example/t/hunter2/a", "channels"),
        ("a=https://mirror.example/a?token=hunter2", "is not CHANNEL=ADDRESS"),
    ],
)
def test_wrong_channels_are_refused(tmp_path: Path, value: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        load_settings(directory=tmp_path, start=tmp_path, environ={"IMAGEFACTORY_CHANNELS": value})
    assert message in caught.value.message
    assert "$IMAGEFACTORY_CHANNELS" in caught.value.message
    assert "hunter2" not in caught.value.message + caught.value.hint


def test_a_token_in_the_file_is_not_shown(tmp_path: Path) -> None:
    text = '[channels]\n"conda-forge" = "https://mirror.example/t/hunter2=/conda-forge"\n'
    environ = {"HOME": str(tmp_path)}
    write_settings(tmp_path, text, environ)
    with pytest.raises(UsageError, match="is not a channel or its place") as caught:
        load_settings(directory=tmp_path, start=tmp_path, environ=environ)
    assert "hunter2" not in caught.value.message + caught.value.hint


def test_solvers_by_name_or_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def solver(value: str) -> str:
        environ = {"IMAGEFACTORY_SOLVER": value} if value else {}
        return load_settings(directory=tmp_path, start=tmp_path, environ=environ).solver.value

    (tmp_path / "micromamba").touch()
    monkeypatch.chdir(tmp_path)
    assert solver("") == "rattler"
    assert [solver(name) for name in ("conda", "mamba", "micromamba")] == ["conda", "mamba", "micromamba"]
    assert solver(str(tmp_path / "micromamba")) == str(tmp_path / "micromamba")
    for wrong in ("libmamba", str(tmp_path / "nothing"), "./micromamba"):
        with pytest.raises(UsageError, match="solver"):
            solver(wrong)


# --- places --------------------------------------------------------------------------------------


def test_the_longest_beginning_fits_best() -> None:
    setting = f"{CHANNEL_ROOT}=https://all.example,conda-forge=https://forge.example/x/,lab=/data/a b"
    channels = find_channels(setting, {}, "")
    assert channels.place(f"{FORGE}/noarch/x.conda") == "https://forge.example/x/noarch/x.conda"
    assert channels.place(FORGE) == "https://forge.example/x"
    assert (
        channels.place(f"{FORGE}-two/noarch/x.conda") == "https://all.example/conda-forge-two/noarch/x.conda"
    )
    assert channels.place(f"{CHANNEL_ROOT}/lab/noarch/x.conda") == "file:///data/a%20b/noarch/x.conda"
    assert channels.place("https://other.example/x") == "https://other.example/x"


def test_true_addresses_come_back() -> None:
    nvidia = f"{CHANNEL_ROOT}/nvidia"
    channels = find_channels("nvidia=http://m/n,nvidia/label/a=http://m/n/label/a", {}, "")
    both = (nvidia, f"{nvidia}/label/a")
    for true in (*both, f"{nvidia}/linux-64/x.conda", f"{nvidia}/label/a/linux-64/x.conda"):
        assert channels.true_address(channels.place(true), both) == true
    assert (
        channels.true_address("https://elsewhere.example/x.conda", both)
        == "https://elsewhere.example/x.conda"
    )


# --- credentials ---------------------------------------------------------------------------------


def write_credentials(path: Path, entries: Mapping[str, object]) -> dict[str, str]:
    path.write_text(json.dumps(entries))
    return {"RATTLER_AUTH_FILE": str(path)}


def test_credentials_by_host_and_domain(tmp_path: Path) -> None:
    entries = {"*.example.org": {"BearerToken": "b"}, "repo.example.org": {"CondaToken": "c/d"}}
    channels = find_channels("", write_credentials(tmp_path / "auth.json", entries), "")
    assert channels.address("https://repo.example.org/x") == "https://repo.example.org/t/c%2Fd/x"
    assert channels.address("https://a.b.example.org/x") == "https://a.b.example.org/x"
    assert "c%2Fd" not in redact(channels.address("https://repo.example.org/x"))
    assert "BearerToken" not in repr(channels)


def test_netrc_gives_way_to_rattlers_own_file(tmp_path: Path) -> None:
    (tmp_path / ".netrc").write_text(
        "machine a.example login ann password one\nmachine b.example login b password c\n"
        "default login anonymous password me@example.org\n"
    )
    (tmp_path / ".rattler").mkdir()
    write_credentials(tmp_path / ".rattler/credentials.json", {"a.example": {"BearerToken": "t"}})
    channels = find_channels("", {"HOME": str(tmp_path)}, "")
    assert dict(channels.credentials) == {
        "a.example": {"BearerToken": "t"},
        "b.example": {"BasicHTTP": {"username": "b", "password": "c"}},
    }
    assert channels.login("https://b.example/x") == ("b", "c")


@pytest.mark.parametrize("text", ["{", "[]", '{"a": 1}', '{"a": {}}'])
def test_a_broken_file_of_credentials_is_named_and_not_quoted(tmp_path: Path, text: str) -> None:
    (tmp_path / "auth.json").write_text(text)
    with fails("channel-credentials-invalid", message="auth.json") as caught:
        find_channels("", {"RATTLER_AUTH_FILE": str(tmp_path / "auth.json")}, "")
    (tmp_path / ".netrc").write_text("machine a.example bogus secret-word")
    with fails("channel-credentials-invalid") as caught:
        find_channels("", {"HOME": str(tmp_path)}, "")
    assert "secret-word" not in caught.value.message


@pytest.mark.parametrize(
    ("options", "credential"),
    [
        (ChannelOptions(users={"ann": "p w"}), {"BasicHTTP": {"username": "ann", "password": "p w"}}),
        (ChannelOptions(bearer="b-1"), {"BearerToken": "b-1"}),
        (ChannelOptions(token="c-1"), {"CondaToken": "c-1"}),
    ],
)
def test_a_private_channel(
    folder: Path, tmp_path: Path, options: ChannelOptions, credential: dict[str, object]
) -> None:
    """Its records and its packages, with the credential and not without."""
    (folder / "conda-forge/noarch/x.conda").write_bytes(b"package")
    with channel_server(folder, options) as server:
        setting = f"conda-forge={server.url}/conda-forge"
        stranger = find_channels(setting, {}, "")
        with fails("channel-access-denied", message="401", hint="127.0.0.1"):
            solve(stranger, tmp_path / "cache")
        web = HttpSession(stranger, retry_policy=QUICK)
        with pytest.raises(RejectedError, match="401"):
            web.size(stranger.address(f"{FORGE}/noarch/x.conda"))
        web.close()

        friend = find_channels(
            setting, write_credentials(tmp_path / "auth.json", {"127.0.0.1": credential}), ""
        )
        assert solve(friend, tmp_path / "cache")["numpy"] == f"{FORGE}/linux-64/numpy-2.0-0.conda"
        web = HttpSession(friend, retry_policy=QUICK)
        assert web.size(friend.address(f"{FORGE}/noarch/x.conda")) == 7
        web.close()


def test_credentials_of_this_machine_are_not_asked(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / ".netrc").write_text("machine 127.0.0.1 login ann password one\n")
    monkeypatch.setenv("HOME", str(tmp_path))
    with channel_server(folder, ChannelOptions(users={"ann": "one"})) as server:
        stranger = find_channels(f"conda-forge={server.url}/conda-forge", {}, "")
        with fails("channel-access-denied", message="401"):
            solve(stranger, tmp_path / "cache")
        web = HttpSession(stranger, retry_policy=QUICK)
        with pytest.raises(RejectedError, match="401"):
            web.size(f"{server.url}/conda-forge/noarch/repodata.json")
        web.close()


# --- what a container is told --------------------------------------------------------------------


def test_a_container_is_told_what_it_needs_and_no_more(tmp_path: Path) -> None:
    entries = {"mirror.example": {"BearerToken": "b"}, "other.example": {"CondaToken": "never"}}
    setting = "conda-forge=https://mirror.example/forge,pytorch=https://other.example/pytorch"
    channels = find_channels(setting, write_credentials(tmp_path / "auth.json", entries), "")
    site = channels.site(
        [f"{FORGE}/noarch/a.conda", f"{FORGE}/linux-64/b.conda", "https://far.example/c/x.conda"]
    )
    assert json.loads(site.text) == {
        "mirrors": {FORGE: "https://mirror.example/forge"},
        "auth": {"mirror.example": {"BearerToken": "b"}},
    }
    assert (site.hidden, site.loopback) == (("b",), False)
    assert "mirror.example" not in repr(site)


def test_a_container_reaches_loopback_and_no_folder(tmp_path: Path) -> None:
    channels = find_channels(f"a=http://127.0.0.1:8080/a,lab={tmp_path}", {}, "")
    assert channels.site([f"{CHANNEL_ROOT}/a/noarch/x.conda"]).loopback
    with fails("channel-not-in-container", message="x.conda"):
        channels.site([f"{CHANNEL_ROOT}/lab/noarch/x.conda"])


# --- faults --------------------------------------------------------------------------------------


def test_a_channel_that_is_a_folder(folder: Path, tmp_path: Path) -> None:
    channels = find_channels(f"conda-forge={folder}/conda-forge", {}, "")
    assert solve(channels, tmp_path / "cache")["python"] == f"{FORGE}/linux-64/python-3.11.9-0.conda"
    (folder / "conda-forge/noarch/repodata.json").unlink()
    with fails("channel-not-indexed", hint="rattler-index"):
        solve(channels, tmp_path / "cache")


@pytest.mark.parametrize(
    ("fault", "code", "reason", "hint"),
    [
        (Fault(status=403), "channel-access-denied", "403", "~/.netrc"),
        (Fault(status=404), "channel-not-found", "404", "`channels`"),
        (Fault(status=500), "channel-unreachable", "500", "mirror"),
        (Fault(drop=True), "channel-unreachable", "connection closed", "mirror"),
        (Fault(cut="connection"), "channel-unreachable", "end of file", "mirror"),
        (Fault(cut="file"), "channel-unreachable", "EOF", "mirror"),
    ],
)
def test_a_channel_with_a_fault_is_told_and_mended(
    server: ChannelServer, tmp_path: Path, fault: Fault, code: str, reason: str, hint: str
) -> None:
    channels = ChannelAccess(mirrors=((CHANNEL_ROOT, server.url),), retries=1)
    server.fail(r"repodata\.json$", fault)
    with fails(code, message=(reason, f"{FORGE} (at {server.url}/conda-forge)"), hint=hint) as caught:
        solve(channels, tmp_path / "cache")
    assert caught.value.exit_code == 5
    server.mend()
    assert len(solve(channels, tmp_path / "cache")) == 2  # nothing broken was kept


def test_a_channel_by_its_full_address_as_the_recipe_writes_it(server: ChannelServer, tmp_path: Path) -> None:
    written = server.url.replace("http://127.0.0.1", "http://LocalHost") + "/conda-forge"
    assert solve(ChannelAccess(), tmp_path, written)["python"] == f"{written}/linux-64/python-3.11.9-0.conda"


def test_a_passing_fault_is_not_noticed(server: ChannelServer, tmp_path: Path) -> None:
    server.fail(r"noarch/repodata\.json$", Fault(status=503, times=1))
    server.fail(r"linux-64/repodata\.json$", Fault(cut="connection", times=1))
    assert len(solve(ChannelAccess(mirrors=((CHANNEL_ROOT, server.url),)), tmp_path / "cache")) == 2


def test_records_that_did_not_change_are_not_sent_again(server: ChannelServer, tmp_path: Path) -> None:
    channels = ChannelAccess(mirrors=((CHANNEL_ROOT, server.url),))
    solve(channels, tmp_path / "cache")
    first = server.sent
    assert first > 0
    solve(channels, tmp_path / "cache")
    assert server.sent == first


def test_nobody_listens(tmp_path: Path) -> None:
    with fails("channel-unreachable", message=("Connection refused", "(2 times in a row)")):
        solve(ChannelAccess(mirrors=((CHANNEL_ROOT, "http://127.0.0.1:9"),), retries=1), tmp_path)


def test_certificates_of_the_site(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    authority, server_pem = make_certificates(tmp_path)
    (tmp_path / "other").mkdir()
    before = str(make_certificates(tmp_path / "other")[0])
    monkeypatch.setenv("SSL_CERT_DIR", "/nowhere")
    monkeypatch.setenv("SSL_CERT_FILE", before)
    with channel_server(folder, ChannelOptions(certificate=server_pem)) as server:
        mirrors = ((CHANNEL_ROOT, server.url),)
        with fails("channel-certificate-untrusted", hint="certificates"):
            solve(ChannelAccess(mirrors=mirrors, retries=0), tmp_path / "cache")
        trusting = ChannelAccess(mirrors=mirrors, certificates=str(authority), retries=0)
        assert len(solve(trusting, tmp_path / "cache")) == 2
        web = HttpSession(trusting, retry_policy=QUICK)
        assert web.size(trusting.address(f"{FORGE}/noarch/repodata.json")) > 0
        web.close()
    assert (os.environ["SSL_CERT_DIR"], os.environ["SSL_CERT_FILE"]) == ("/nowhere", before)


def test_a_machine_that_trusts_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSL_CERT_DIR", "/nowhere")
    monkeypatch.delenv("SSL_CERT_FILE", raising=False)
    with fails("channel-certificates-missing", hint="ca-certificates"):
        ChannelAccess().gateway(tmp_path)


def make_certificates(folder: Path) -> tuple[Path, Path]:
    """An authority, and a server's certificate of it with its key, for 127.0.0.1."""
    script = """
    openssl req -x509 -newkey rsa:2048 -nodes -keyout ca.key -out ca.pem -days 2 -subj "/CN=a site"
    openssl req -newkey rsa:2048 -nodes -keyout server.key -out server.csr -subj /CN=127.0.0.1 \
      -addext subjectAltName=IP:127.0.0.1
    openssl x509 -req -in server.csr -CA ca.pem -CAkey ca.key -CAcreateserial -copy_extensions copyall \
      -days 2 -out server.pem
    cat server.key >> server.pem
    """
    subprocess.run(["/bin/sh", "-ec", script], cwd=folder, check=True, capture_output=True)
    return folder / "ca.pem", folder / "server.pem"


def test_without_rattler_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rattler", None)
    with fails("extra-not-installed") as caught:
        ChannelAccess().gateway(tmp_path)
    assert caught.value.hint == extra_hint("conda")


def test_a_lock_sends_no_password_without_tls(tmp_path: Path) -> None:
    """Its addresses come from anyone; those of the user's own settings may be without."""
    (tmp_path / ".netrc").write_text("machine lab.example login ann password hunter2\n")
    channels = find_channels("lab=http://lab.example:8080/lab", {"HOME": str(tmp_path)}, "")
    assert channels.login("https://lab.example/x") == ("ann", "hunter2")
    assert channels.login("http://lab.example:8080/lab/x") == ("ann", "hunter2")
    assert channels.login("http://lab.example/lab/x") is without_login
    auth = tmp_path / "auth.json"
    auth.write_text('{"lab.example": {"CondaToken": "hunter2"}}')
    tokens = find_channels("", {"HOME": str(tmp_path), "RATTLER_AUTH_FILE": str(auth)}, "")
    assert "hunter2" in tokens.address("https://lab.example/lab/x")
    assert "hunter2" not in tokens.address("http://lab.example/lab/x")
