"""Settings meet what they are for: a registry is reached as this machine's files and variables say."""

from __future__ import annotations

import base64
import json
import re
from pathlib import Path

import certifi
import pytest

from imagefactory.access import (
    Access,
    conda_channels,
    debian_mirror,
    open_registry,
    package_index,
    registry_place,
    repository_of,
)
from imagefactory.build.secrets import find_secrets
from imagefactory.oci.transfer import CancelToken, _TransferStoppedError
from imagefactory.settings.load import load_settings
from tests.made.errors import fails

CERTIFI = Path(certifi.where())
PEM = re.compile("-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", re.DOTALL)


def access(folder: Path, **variables: str) -> Access:
    environ = {"HOME": str(folder), **variables}
    return Access(settings=load_settings(directory=folder, start=folder, environ=environ), environ=environ)


def test_only_what_the_settings_list_is_asked_by_http(tmp_path: Path) -> None:
    ours = access(tmp_path, IMAGEFACTORY_PLAIN_HTTP="box.example:5000")
    assert open_registry(ours, "box.example:5000").plain
    assert not open_registry(ours, "box.example:5001").plain


def test_a_registry_gets_what_docker_login_left(tmp_path: Path) -> None:
    login = {"auths": {"box.example": {"auth": base64.b64encode(b"ann:word").decode()}}}
    (tmp_path / "auth.json").write_text(json.dumps(login))
    ours = access(tmp_path, REGISTRY_AUTH_FILE=str(tmp_path / "auth.json"))
    options = open_registry(ours, "box.example").options
    found = options.credentials("box.example")
    assert found is not None
    assert (found.user, found.secret) == ("ann", "word")
    assert options.credentials("other.example") is None


def test_every_client_trusts_the_site_and_the_machine(tmp_path: Path) -> None:
    """Registries, package index, conda's channels, Debian's archive and builds: all the same certificates."""
    first, second = PEM.findall(CERTIFI.read_text())[:2]
    (tmp_path / "site.pem").write_text(first)
    (tmp_path / "machine.pem").write_text(second)
    ours = access(
        tmp_path,
        IMAGEFACTORY_CACHE=str(tmp_path / "cache"),
        IMAGEFACTORY_CERTIFICATES=str(tmp_path / "site.pem"),
        IMAGEFACTORY_DEBIAN_MIRROR="https://box.example/debian",
        SSL_CERT_FILE=str(tmp_path / "machine.pem"),
        PIP_CONFIG_FILE="/dev/null",
    )
    index = package_index(ours)
    both = Path(index.certificates).read_text()
    assert PEM.findall(both) == [second, first]
    assert open_registry(ours, "box.example").options.certificates == Path(index.certificates)
    assert conda_channels(ours).certificates == index.certificates
    assert debian_mirror(ours).certificates == index.certificates
    assert find_secrets(index, ours.environ).certificates == both.encode()
    plain = access(tmp_path, IMAGEFACTORY_DEBIAN_MIRROR="https://box.example/debian")
    assert debian_mirror(plain).certificates == ""  # as the machine's own apt.conf has it


def test_a_pulled_brake_ends_a_registrys_wait(tmp_path: Path) -> None:
    brake = CancelToken()
    sleep = open_registry(access(tmp_path), "box.example", brake).options.sleep
    sleep(0)
    brake.pull()
    with pytest.raises(_TransferStoppedError):
        sleep(60)


def test_a_place_that_is_given_beats_the_setting(tmp_path: Path) -> None:
    ours = access(tmp_path, IMAGEFACTORY_REGISTRY="box.example/images")
    assert registry_place(ours) == ("box.example", "images")
    assert registry_place(ours, "other.example:5000/a/b") == ("other.example:5000", "a/b")
    with fails("no-registry-set"):
        registry_place(access(tmp_path))
    assert repository_of("images", "pytorch") == "images/pytorch"
    assert repository_of("", "pytorch") == "pytorch"
