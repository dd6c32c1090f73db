"""Settings know where they came from, and a wrong file is said by name."""

from __future__ import annotations

import json
import ssl
from pathlib import Path

import pytest
from click.testing import CliRunner

from imagefactory.cli import cli
from imagefactory.errors import EXIT_TOOL, UsageError
from imagefactory.lock.base import apt_config
from imagefactory.lock.index import find_index, trusting
from imagefactory.settings import load_settings

ENVIRON = {"HOME": "/home/someone"}


@pytest.fixture
def bundle() -> Path:
    """This machine's own bundle of certificates."""
    path = Path(ssl.get_default_verify_paths().openssl_cafile).resolve()
    return path if path.is_file() else Path("/etc/ssl/certs/ca-certificates.crt")


def test_defaults_follow_the_xdg_folders(tmp_path: Path) -> None:
    settings = load_settings(directory=None, start=tmp_path, environ=ENVIRON)
    assert settings.store.value == "/home/someone/.local/share/imagefactory/store"
    assert settings.cache.value == "/home/someone/.cache/imagefactory"
    moved = load_settings(directory=None, start=tmp_path, environ={**ENVIRON, "XDG_CACHE_HOME": "/c"})
    assert moved.cache_path == Path("/c/imagefactory")
    assert settings.worker_count >= 1


def test_the_nearest_file_upwards_is_the_root(tmp_path: Path) -> None:
    (tmp_path / "imagefactory.toml").write_text('store = "images"\nworkers = 3\n')
    below = tmp_path / "a" / "b"
    below.mkdir(parents=True)
    settings = load_settings(directory=None, start=below, environ=ENVIRON)
    assert settings.root_path == tmp_path
    assert settings.store_path == tmp_path / "images"
    assert settings.store.origin == str(tmp_path / "imagefactory.toml")
    assert settings.worker_count == 3


def test_the_environment_beats_the_file(tmp_path: Path) -> None:
    (tmp_path / "imagefactory.toml").write_text('codec = "gzip"\n')
    environ = {**ENVIRON, "IMAGEFACTORY_CODEC": "zstd", "IMAGEFACTORY_STORE": ""}
    settings = load_settings(directory=tmp_path, start=Path("/"), environ=environ)
    assert settings.codec.value == "zstd"
    assert settings.codec.origin == "$IMAGEFACTORY_CODEC"
    assert settings.store.origin == "default"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("stroe = 'x'", "unknown setting 'stroe'"),
        ("store = ", "cannot be read as TOML"),
        ("store = ['x']", "'store' must be a string"),
        ("workers = true", "'workers' must be a string"),
        ("workers = -1", "workers '-1'"),
        ("workers = '٣'", "is not a count"),
        ("codec = 'lzma'", "codec 'lzma'"),
        ("root = '/'", "unknown setting 'root'"),
        ("engine = 'podman'", "engine 'podman'"),
        ("runner = 'chroot'", "runner 'chroot'"),
        ("registry = 'https://registry.example'", "is not the address of a registry"),
        ("registry = 'images'", "is not the address of a registry"),
        ("registry = 'registry.example/images:latest'", "is not the address of a registry"),
        ("certificates = 'none.pem'", "none.pem"),
        ("certificates = 'imagefactory.toml'", "cannot be used"),
        ("plain-http = 'registry.example/images'", "is not a host alone"),
        ("plain-http = ['registry.example']", "'plain-http' must be a string"),
        ("mirrors = 'docker.io=registry.example'", "'mirrors' must be a table"),
        ("[mirrors]\ndocker.io = 'registry.example'", "'mirrors' must be a table"),
        ("[mirrors]\n'docker.io' = 'registry.example,x'", "'registry.example,x' in 'mirrors'"),
        ("[mirrors]\n'library' = 'registry.example'", "'library' is not the address"),
        ("[mirrors]\n'docker.io' = 'Registry.example/UP'", "is not the address of a registry"),
    ],
)
def test_a_wrong_file_is_refused_by_name(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "imagefactory.toml").write_text(text, encoding="utf-8")
    with pytest.raises(UsageError) as caught:
        load_settings(directory=tmp_path, start=tmp_path, environ=ENVIRON)
    assert message in caught.value.message
    assert "imagefactory.toml" in caught.value.message


def test_mirrors_read_alike_from_the_file_and_from_the_environment(tmp_path: Path) -> None:
    (tmp_path / "imagefactory.toml").write_text(
        'plain-http = "registry.example:5000, 10.0.0.1"\n'
        '[mirrors]\n"docker.io" = "registry.example:5000/hub"\n"quay.io/one" = "10.0.0.1"\n'
    )
    from_file = load_settings(directory=tmp_path, start=tmp_path, environ=ENVIRON)
    assert from_file.mirror_map == (("docker.io", "registry.example:5000/hub"), ("quay.io/one", "10.0.0.1"))
    assert from_file.plain_hosts == ("registry.example:5000", "10.0.0.1")
    assert from_file.mirrors.origin == str(tmp_path / "imagefactory.toml")
    given = {**ENVIRON, "IMAGEFACTORY_MIRRORS": "docker.io=registry.example:5000/hub, quay.io/one=10.0.0.1"}
    from_environment = load_settings(directory=None, start=Path("/"), environ=given)
    assert from_environment.mirror_map == from_file.mirror_map
    assert from_environment.mirrors.origin == "$IMAGEFACTORY_MIRRORS"


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("docker.io", "is not HOST=MIRROR"),
        ("docker.io=one.example,docker.io=two.example", "stands there twice"),
        ("docker.io=https://one.example", "is not the address of a registry"),
    ],
)
def test_wrong_mirrors_of_the_environment(tmp_path: Path, value: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        load_settings(directory=tmp_path, start=tmp_path, environ={**ENVIRON, "IMAGEFACTORY_MIRRORS": value})
    assert message in caught.value.message
    assert "$IMAGEFACTORY_MIRRORS" in caught.value.message


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("REGISTRY", "ann:hunter2@registry.example/images"),
        ("PLAIN_HTTP", "ann:hunter2@registry.example"),
        ("MIRRORS", "docker.io=ann:hunter2@registry.example"),
        ("MIRRORS", "ann:hunter2@registry.example"),
    ],
)
def test_passwords_are_refused_and_not_repeated(tmp_path: Path, name: str, value: str) -> None:
    with pytest.raises(UsageError) as caught:
        load_settings(directory=tmp_path, start=tmp_path, environ={**ENVIRON, f"IMAGEFACTORY_{name}": value})
    assert "hunter2" not in caught.value.message + caught.value.hint


def test_certificates_are_found_beside_the_file_that_names_them(tmp_path: Path, bundle: Path) -> None:
    (tmp_path / "imagefactory.toml").write_text('certificates = "site.pem"\n')
    (tmp_path / "site.pem").write_bytes(bundle.read_bytes())
    settings = load_settings(directory=tmp_path, start=Path("/"), environ=ENVIRON)
    assert settings.certificates_path == tmp_path / "site.pem"


def test_certificates_reach_the_index_uv_and_apt(tmp_path: Path, bundle: Path) -> None:
    environ = {**ENVIRON, "SSL_CERT_DIR": str(tmp_path), "IMAGEFACTORY_CERTIFICATES": str(bundle)}
    settings = load_settings(directory=tmp_path, start=tmp_path, environ=environ)
    found = find_index(settings.index, environ=environ, prefix=tmp_path, etc=tmp_path)
    index = trusting(found, settings.certificates_path)
    assert index.certificates == str(bundle)
    assert dict(index.environment)["SSL_CERT_FILE"] == str(bundle)
    assert "SSL_CERT_DIR" not in dict(index.environment)
    assert trusting(found, None) == found
    assert f'Acquire::https::CaInfo "{bundle}";' in apt_config(tmp_path, str(bundle))
    assert "CaInfo" not in apt_config(tmp_path)


def test_every_setting_has_a_row_under_the_name_of_the_file(tmp_path: Path) -> None:
    settings = load_settings(directory=tmp_path, start=tmp_path, environ=ENVIRON)
    names = [name for name, _ in settings.rows()]
    assert {"root", "debian-mirror", "plain-http", "mirrors"} <= set(names)
    (tmp_path / "imagefactory.toml").write_text(
        "".join(f'{name} = "{setting.value}"\n' for name, setting in settings.rows()[1:] if setting.value)
    )
    again = load_settings(directory=tmp_path, start=tmp_path, environ=ENVIRON)
    assert [setting.value for _, setting in again.rows()] == [setting.value for _, setting in settings.rows()]


def test_the_command_prints_origins_and_no_password(tmp_path: Path) -> None:
    (tmp_path / "imagefactory.toml").write_text('index = "https://ann:hunter2@index.example/simple?key=x"\n')
    environ = {"IMAGEFACTORY_DEBIAN_MIRROR": "https://bob:hunter2@debian.example/debian"}
    ran = CliRunner().invoke(cli, ["-C", str(tmp_path), "settings", "--json"], env=environ)
    assert ran.exit_code == 0, ran.output
    rows = {row["name"]: row for row in json.loads(ran.stdout)["settings"]}
    assert rows["index"]["value"] == "https://index.example/simple"
    assert rows["index"]["origin"] == str(tmp_path / "imagefactory.toml")
    assert rows["debian-mirror"] == {
        "name": "debian-mirror",
        "value": "https://debian.example/debian",
        "origin": "$IMAGEFACTORY_DEBIAN_MIRROR",
    }
    table = CliRunner().invoke(cli, ["-C", str(tmp_path), "settings"], env=environ).stdout
    assert table.splitlines()[0].split() == ["NAME", "VALUE", "ORIGIN"]
    assert len(table.splitlines()) == len(rows) + 1
    assert "hunter2" not in table


def test_a_misspelt_variable_is_refused_and_not_ignored(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="IMAGEFACTORY_STOER"):
        load_settings(directory=tmp_path, start=tmp_path, environ={**ENVIRON, "IMAGEFACTORY_STOER": "/x"})


def test_build_takes_the_configured_engine(tmp_path: Path) -> None:
    environ = {
        "IMAGEFACTORY_STORE": str(tmp_path / "store"),
        "IMAGEFACTORY_CACHE": str(tmp_path / "cache"),
        "IMAGEFACTORY_ENGINE": "docker",
        "DOCKER_HOST": f"unix://{tmp_path}/docker.sock",
    }
    root = Path(__file__).parents[2]
    ran = CliRunner().invoke(cli, ["-C", str(root), "build", "pytorch-2.3-cu121"], env=environ)
    assert ran.exit_code == EXIT_TOOL, ran.output
    assert f"no docker daemon answers at unix://{tmp_path}/docker.sock" in ran.output
