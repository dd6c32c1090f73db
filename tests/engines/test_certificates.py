"""A site with certificates of its own: the setting `certificates` reaches uv, our own client and apt."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.made.wheels import make_wheel
from tests.services.authority import make_authority

RECIPE = """\
family: lab
description: one package
source: pypi
framework: lab
platform: linux/amd64
base: debian-12
python: "3.11"
capabilities: ["8.0"]
packages: [nvidia-cuda-runtime-cu12]
matrix:
  - version: "1.0"
    cuda: ["12"]
"""
BASES = """\
bases:
  - {name: debian-12, suite: bookworm, python: "3.11", glibc: "2.36", packages: [python3], public: a.b/c:12}
"""


class Silent(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


@dataclass(frozen=True, kw_only=True)
class Site:
    """An https server on 127.0.0.1 with an index and a Debian archive, and the CA that signed for it."""

    folder: Path
    address: str

    def run(self, *arguments: str, certificates: bool, **variables: str) -> subprocess.CompletedProcess[str]:
        known = {"SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "PIP_CERT"}
        environ = {name: value for name, value in os.environ.items() if name not in known}
        environ |= {
            "no_proxy": "127.0.0.1",
            "IMAGEFACTORY_INDEX": f"{self.address}/simple",
            "IMAGEFACTORY_DEBIAN_MIRROR": f"{self.address}/debian",
            "IMAGEFACTORY_CACHE": str(self.folder / "cache"),
            "UV_HTTP_RETRIES": "0",
            **variables,
        }
        if certificates:
            environ["IMAGEFACTORY_CERTIFICATES"] = str(self.folder / "ca.pem")
        return subprocess.run(
            [sys.executable, "-m", "imagefactory", "-C", str(self.folder / "root"), *arguments],
            env=environ, capture_output=True, text=True, timeout=120,
        )  # fmt: skip


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("certificates")
    leaf = make_authority(folder).sign("127.0.0.1")
    served = folder / "served"
    for name, version in (("lab", "1.0"), ("nvidia_cuda_runtime_cu12", "12.1.1")):
        page = served / "simple" / name.replace("_", "-")
        page.mkdir(parents=True)
        wheel = make_wheel(page, name, {f"{name}/__init__.py": b""}, version=version)
        digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
        (page / "index.html").write_text(f'<a href="{wheel.name}#sha256={digest}">{wheel.name}</a>')
    for suite in ("debian/dists/bookworm", "debian-security/dists/bookworm-security"):
        (served / suite).mkdir(parents=True)
        (served / suite / "InRelease").write_text("Suite: bookworm\n")
    (folder / "root" / "recipes").mkdir(parents=True)
    (folder / "root" / "imagefactory.toml").touch()
    (folder / "root" / "recipes" / "lab.yaml").write_text(RECIPE)
    (folder / "root" / "recipes" / "bases.yaml").write_text(BASES)
    server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Silent, directory=str(served)))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(leaf.path, leaf.key)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield Site(folder=folder, address=f"https://127.0.0.1:{server.server_address[1]}")
    server.shutdown()
    server.server_close()
    thread.join()


def test_a_lock_is_solved_and_measured_with_the_sites_certificates(site: Site) -> None:
    refused = site.run("lock", "lab-1.0-cu12", certificates=False)
    assert refused.returncode == 5
    assert "ertificate" in refused.stderr
    done = site.run("lock", "lab-1.0-cu12", certificates=True)
    assert done.returncode == 0, done.stderr


def test_a_registry_s_own_authority_is_added_to_what_the_machine_trusts(site: Site, tmp_path: Path) -> None:
    """The index and the archive have certificates that the machine trusts; the registry's CA is another."""
    other = make_authority(tmp_path, "the registry's")
    variables = {
        "IMAGEFACTORY_CERTIFICATES": str(other.path),
        "IMAGEFACTORY_CACHE": str(tmp_path / "cache"),
        "SSL_CERT_FILE": str(site.folder / "ca.pem"),
    }
    done = site.run("lock", "--upgrade", "lab-1.0-cu12", certificates=False, **variables)
    assert done.returncode == 0, done.stderr
    told = json.loads(site.run("doctor", "--json", certificates=False, **variables).stdout)
    states = {finding["name"]: finding["status"] for finding in told["findings"]}
    assert (states["package index"], states["debian mirror"]) == ("ok", "ok")


@pytest.mark.parametrize("certificates", [False, True])
def test_the_doctor_asks_with_the_sites_certificates(site: Site, *, certificates: bool) -> None:
    done = site.run("doctor", "--json", certificates=certificates)
    findings = {finding["name"]: finding for finding in json.loads(done.stdout)["findings"]}
    state = "ok" if certificates else "denied"
    assert findings["package index"]["status"] == state, findings["package index"]
    assert findings["debian mirror"]["status"] == state, findings["debian mirror"]
