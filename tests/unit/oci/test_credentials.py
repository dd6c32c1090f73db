"""Credentials from docker's and podman's files and from helpers that are real programs."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import pytest

from imagefactory.errors import RegistryError
from imagefactory.oci import credentials
from imagefactory.oci.credentials import Credential, anonymous, find_credentials
from tests.made.errors import fails

SECRET = "open-sesame-4711"


def auth(user: str = "builder", secret: str = SECRET) -> dict[str, str]:
    return {"auth": base64.b64encode(f"{user}:{secret}".encode()).decode()}


class Machine:
    """A home, a PATH with helpers, and the environment that names them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environ = {
            "HOME": str(folder / "home"),
            "PATH": f"{folder / 'bin'}:/usr/bin:/bin",
            "ASKED": str(folder / "asked"),
        }

    def write(self, value: object, path: str = "home/.docker/config.json") -> Path:
        file = self.folder / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(value if isinstance(value, str) else json.dumps(value))
        return file

    def helper(self, name: str, script: str) -> None:
        """A helper that notes what it was given on its command line and on stdin."""
        path = self.folder / "bin" / f"docker-credential-{name}"
        path.parent.mkdir(exist_ok=True)
        path.write_text(f'#!/bin/sh\nhost=$(cat)\necho "$* $host" >> "$ASKED"\n{script}\n')
        path.chmod(0o755)

    def find(self, host: str) -> Credential | None:
        return find_credentials(self.environ)(host)

    @property
    def asked(self) -> list[str]:
        path = self.folder / "asked"
        return path.read_text().splitlines() if path.exists() else []


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_a_machine_without_settings_is_anonymous(machine: Machine) -> None:
    assert machine.find("registry.example.org") is None
    assert find_credentials({})("registry.example.org") is None
    assert anonymous("registry.example.org") is None


def test_what_docker_login_left_is_found(machine: Machine) -> None:
    path = machine.write({"auths": {"registry.example.org": auth(), "other.example.org:5000": auth("x")}})
    assert machine.find("registry.example.org") == Credential(user="builder", secret=SECRET, origin=str(path))
    found = machine.find("other.example.org:5000")
    assert found is not None
    assert found.user == "x"
    assert machine.find("other.example.org") is None
    assert machine.find("registry.example.org:5000") is None


def test_a_password_may_hold_colons(machine: Machine) -> None:
    machine.write({"auths": {"a.example.org": auth(secret="a:b:c")}})
    found = machine.find("a.example.org")
    assert found is not None
    assert (found.user, found.secret) == ("builder", "a:b:c")
    assert base64.b64decode(found.basic.removeprefix("Basic ")) == b"builder:a:b:c"


@pytest.mark.parametrize(
    "key", ["https://a.example.org", "https://a.example.org/v1/", "http://a.example.org/v2/"]
)
def test_old_keys_with_addresses_match(machine: Machine, key: str) -> None:
    machine.write({"auths": {key: auth()}})
    assert machine.find("a.example.org") is not None
    assert machine.find("b.example.org") is None


def test_podmans_keys_of_one_path_are_not_of_the_whole_host(machine: Machine) -> None:
    machine.write({"auths": {"a.example.org/team": auth()}})
    assert machine.find("a.example.org") is None


@pytest.mark.parametrize("key", ["https://index.docker.io/v1/", "docker.io", "registry-1.docker.io"])
@pytest.mark.parametrize("host", ["docker.io", "registry-1.docker.io"])
def test_docker_hub_has_an_old_name(machine: Machine, host: str, key: str) -> None:
    machine.write({"auths": {key: auth()}})
    assert machine.find(host) is not None


def test_an_identity_token_has_no_user(machine: Machine) -> None:
    machine.write({"auths": {"a.example.org": {**auth("", ""), "identitytoken": "token-4711"}}})
    found = machine.find("a.example.org")
    assert found is not None
    assert (found.user, found.secret) == ("", "token-4711")


def test_the_files_are_asked_in_order(machine: Machine, tmp_path: Path) -> None:
    machine.write({"auths": {"a.example.org": auth("docker")}})
    machine.write({"auths": {"a.example.org": auth("set")}}, "docker/config.json")
    machine.write(
        {"auths": {"a.example.org": auth("podman"), "p.example.org": auth()}}, "run/containers/auth.json"
    )
    machine.write({"auths": {"a.example.org": auth("named")}}, "named.json")

    def who() -> str | None:
        found = machine.find("a.example.org")
        return found.user if found else None

    machine.environ["XDG_RUNTIME_DIR"] = str(tmp_path / "run")
    assert who() == "docker"
    assert machine.find("p.example.org") is not None
    machine.environ["DOCKER_CONFIG"] = str(tmp_path / "docker")
    assert who() == "set"
    machine.environ["REGISTRY_AUTH_FILE"] = str(tmp_path / "named.json")
    assert who() == "named"
    assert machine.find("p.example.org") is None  # a named file stands for podman's own
    machine.environ["DOCKER_CONFIG"] = str(tmp_path / "nowhere")
    machine.environ["REGISTRY_AUTH_FILE"] = str(tmp_path / "nowhere.json")
    assert who() is None


# --- helpers -------------------------------------------------------------------------------------


def test_a_helper_is_asked_on_its_stdin(machine: Machine) -> None:
    machine.helper("vault", f"""echo '{{"ServerURL": "x", "Username": "builder", "Secret": "{SECRET}"}}'""")
    machine.write({"credHelpers": {"a.example.org": "vault"}, "auths": {"a.example.org": auth("old")}})
    found = machine.find("a.example.org")
    assert found == Credential(user="builder", secret=SECRET, origin="docker-credential-vault")
    assert machine.asked == ["get a.example.org"]
    assert machine.find("b.example.org") is None


def test_the_store_of_all_hosts_is_asked_then_the_file(machine: Machine) -> None:
    machine.helper("vault", "echo 'credentials not found in native keychain'; exit 1")
    machine.write({"credsStore": "vault", "auths": {"a.example.org": auth(), "b.example.org": {}}})
    found = machine.find("a.example.org")
    assert found is not None
    assert found.user == "builder"
    assert machine.find("b.example.org") is None
    assert "get a.example.org" in machine.asked


def test_a_helpers_token_is_an_identity_token(machine: Machine) -> None:
    machine.helper("vault", """echo '{"Username": "<token>", "Secret": "token-4711"}'""")
    machine.write({"credHelpers": {"docker.io": "vault"}})
    found = machine.find("docker.io")
    assert found is not None
    assert (found.user, found.secret) == ("", "token-4711")


@pytest.mark.parametrize(
    ("script", "named"),
    [
        (f"echo 'cannot unlock: {SECRET}'; exit 1", "exit code 1"),
        ("echo nonsense", "not a credential"),
        ("echo '[]'", "not a credential"),
        ("""echo '{"Username": "x"}'""", "not a credential"),
    ],
)
def test_a_helper_that_fails_is_named(machine: Machine, script: str, named: str) -> None:
    machine.helper("vault", script)
    machine.write({"credsStore": "vault"})
    with fails("credential-helper-failed", named) as caught:
        machine.find("a.example.org")
    assert "docker-credential-vault" in caught.value.message + caught.value.hint
    assert SECRET not in caught.value.message + caught.value.hint


def test_a_helper_that_is_not_installed_is_named(machine: Machine) -> None:
    machine.write({"credsStore": "vault"})
    with fails("credential-helper-missing", "docker-credential-vault"):
        machine.find("a.example.org")


def test_a_helper_is_a_name_and_no_path(machine: Machine, tmp_path: Path) -> None:
    machine.helper("vault", "echo '{}'")
    machine.write({"credsStore": "../bin/docker-credential-vault"})
    with fails("credential-helper-missing"):
        machine.find("a.example.org")
    assert machine.asked == []


def test_a_helper_that_waits_is_given_up(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(credentials, "HELPER_SECONDS", 0.2)
    machine.helper("vault", "exec sleep 20")
    machine.write({"credsStore": "vault"})
    with fails("credential-helper-failed", "seconds"):
        machine.find("a.example.org")


# --- damage --------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["{", "", f'{{"auths": {SECRET}}}', "[]", "7", "\0"])
def test_a_damaged_file_is_named_without_what_it_says(machine: Machine, text: str) -> None:
    path = machine.write(text)
    with pytest.raises(RegistryError) as caught:
        machine.find("a.example.org")
    assert str(path) in caught.value.message
    assert SECRET not in repr(caught.value)


@pytest.mark.parametrize("value", [SECRET, "!!", base64.b64encode(SECRET.encode()).decode(), "w6Q="])
def test_a_damaged_entry_is_said_without_what_it_says(machine: Machine, value: str) -> None:
    machine.write({"auths": {"a.example.org": {"auth": value}}})
    with fails("credentials-invalid", "base64") as caught:
        machine.find("a.example.org")
    assert value not in repr(caught.value)


@pytest.mark.parametrize(
    "value", [{"auths": []}, {"auths": {"a.example.org": 7}}, {"credHelpers": 3}, {"credsStore": {}}, {}]
)
def test_settings_of_another_shape_hold_nothing(machine: Machine, value: object) -> None:
    machine.write(value)
    assert machine.find("a.example.org") is None


def test_a_credential_does_not_show_its_secret() -> None:
    credential = Credential(user="builder", secret=SECRET, origin="x")
    assert SECRET not in f"{credential!r} {credential}"
