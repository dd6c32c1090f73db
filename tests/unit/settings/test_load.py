"""Settings know where they came from, and a wrong file is said by name."""

from __future__ import annotations

import base64
import importlib.util
import json
import os
import re
import ssl
import tomllib
from dataclasses import replace
from pathlib import Path

import certifi
import pytest
from click.testing import CliRunner

from imagefactory.cli import cli
from imagefactory.errors import EXIT_TOOL, UsageError
from imagefactory.lock.debian.archive import apt_config
from imagefactory.lock.pypi.index import find_index, trusting
from imagefactory.settings import files
from imagefactory.settings.choices import ENGINES, RUNNERS
from imagefactory.settings.load import SHIPPED, Settings, load_settings
from imagefactory.trust.keys import SigningKey
from imagefactory.trust.policy import read_trust
from imagefactory.verify.report import EVIDENCE_LOCAL
from tests.made.errors import fails
from tests.made.trusted import trust, write_settings
from tests.made.verdicts import LAB, STRANGER

ROOT = Path(__file__).parents[3]

ENVIRON = {"HOME": "/home/someone"}
PEM = re.compile("-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", re.DOTALL)


def trusted(folder: Path, text: str) -> dict[str, str]:
    """Write the settings of the project in `folder`; return an environment whose user trusts it."""
    environ = {**ENVIRON, "XDG_CONFIG_HOME": str(folder / "config")}
    write_settings(folder, text, environ)
    return environ


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
    environ = trusted(tmp_path, 'store = "images"\nworkers = 3\n')
    below = tmp_path / "a" / "b"
    below.mkdir(parents=True)
    settings = load_settings(directory=None, start=below, environ=environ)
    assert settings.root_path == tmp_path
    assert settings.store_path == tmp_path / "images"
    assert settings.store.origin == str(tmp_path / "imagefactory.toml")
    assert settings.worker_count == 3


def test_the_environment_beats_the_file(tmp_path: Path) -> None:
    (tmp_path / "imagefactory.toml").write_text('codec = "gzip"\n')
    environ = {**ENVIRON, "IMAGEFACTORY_CODEC": "zstd-9", "IMAGEFACTORY_STORE": ""}
    settings = load_settings(directory=tmp_path, start=Path("/"), environ=environ)
    assert settings.codec.value == "zstd-9"
    assert settings.codec.origin == "$IMAGEFACTORY_CODEC"
    assert settings.store.origin == "default"


@pytest.mark.parametrize(
    ("text", "code", "value"),
    [
        ("stroe = 'x'", "setting-unknown", "'stroe'"),
        ("root = '/'", "setting-unknown", "'root'"),
        ("sif_folder = '/x'", "setting-unknown", "'sif_folder'"),
        ("store = ", "settings-file-invalid", ""),
        ("store = ['x']", "setting-invalid", "'store'"),
        ("workers = true", "setting-invalid", "'workers'"),
        ("workers = -1", "setting-invalid", "workers: '-1'"),
        ("workers = '٣'", "setting-invalid", "workers: '٣'"),
        ("codec = 'lzma'", "setting-invalid", "codec: 'lzma'"),
        ("sigstore-bundles = 'maybe'", "setting-invalid", "sigstore-bundles: 'maybe'"),
        ("cooldown = 'soon'", "setting-invalid", "cooldown: 'soon'"),
        ("publishers = 'yes'", "setting-invalid", "publishers: 'yes'"),
        ("debian-snapshot = '/srv'", "setting-invalid", "debian-snapshot: '/srv'"),
        ("engine = 'podman'", "setting-invalid", "engine: 'podman'"),
        ("runner = 'chroot'", "setting-invalid", "runner: 'chroot'"),
        ("registry = 'https://registry.example'", "setting-invalid", "'https://registry.example'"),
        ("catalog = 'https://registry.example'", "setting-invalid", "catalog"),
        ("catalog = 'registry.example/gpu:a b'", "setting-invalid", "catalog"),
        ("catalog = 'ann:secret@registry.example/gpu'", "setting-invalid", "catalog"),
        ("site = 'csc'", "setting-invalid", "site: 'csc'"),
        ("sif-folder = '/data/a b'", "setting-invalid", "sif-folder: '/data/a b'"),
        ("sif-folder = 'osdf:///x\\n+a=1'", "setting-invalid", "sif-folder"),
        ("sif-folder = 'https://x/y'", "setting-invalid", "sif-folder"),
        ("sif-folder = '/data/../x'", "setting-invalid", "sif-folder: '/data/../x'"),
        ("sif-folder = 'osdf:///data/..'", "setting-invalid", "sif-folder"),
        ("sif-folder = '../images'", "setting-invalid", "sif-folder"),
        ("registry = 'images'", "setting-invalid", "'images'"),
        (
            "registry = 'registry.example/images:latest'",
            "setting-invalid",
            "'registry.example/images:latest'",
        ),
        ("certificates = 'none.pem'", "setting-invalid", "none.pem"),
        ("certificates = 'imagefactory.toml'", "certificates-unusable", "certificates"),
        (
            "plain-http = 'registry.example/images'",
            "setting-invalid",
            "plain-http: 'registry.example/images'",
        ),
        ("plain-http = ['registry.example']", "setting-invalid", "'plain-http'"),
        ("mirrors = 'docker.io=registry.example'", "setting-invalid", "'mirrors'"),
        ("[mirrors]\ndocker.io = 'registry.example'", "setting-invalid", "'mirrors'"),
        ("[mirrors]\n'docker.io' = 'registry.example,x'", "setting-invalid", "'registry.example,x'"),
        ("[mirrors]\n'library' = 'registry.example'", "setting-invalid", "'library'"),
        ("[mirrors]\n'docker.io' = 'Registry.example/UP'", "setting-invalid", "'Registry.example/UP'"),
        ("indexes = 'lab=https://x/simple'", "setting-invalid", "'indexes'"),
        ("[indexes]\nlab = 'https://x/a,b'", "setting-invalid", "'https://x/a,b'"),
        ("[indexes]\nLab = 'https://x/simple'", "setting-invalid", "'Lab=https://x/simple'"),
        ("[indexes]\nlab = '/srv/simple'", "setting-invalid", "'lab=/srv/simple'"),
        ("[indexes]\nlab = 'https://ann:secret@x/simple'", "setting-has-credentials", "indexes"),
    ],
)
def test_a_wrong_file_is_refused_by_name(tmp_path: Path, text: str, code: str, value: str) -> None:
    environ = trusted(tmp_path, text)
    with fails(code) as caught:
        load_settings(directory=tmp_path, start=tmp_path, environ=environ)
    assert value in caught.value.message
    assert "imagefactory.toml" in caught.value.message


def test_named_indexes_read_alike_from_the_file_and_from_the_environment(tmp_path: Path) -> None:
    environ = trusted(tmp_path, '[indexes]\nlab = "https://x/simple"\nb-2 = "file:///srv/b"\n')
    from_file = load_settings(directory=tmp_path, start=tmp_path, environ=environ)
    assert from_file.index_map == (("lab", "https://x/simple"), ("b-2", "file:///srv/b"))
    given = {**ENVIRON, "IMAGEFACTORY_INDEXES": "lab=https://x/simple, b-2=file:///srv/b"}
    assert load_settings(directory=None, start=Path("/"), environ=given).index_map == from_file.index_map
    with fails("setting-duplicate", "'lab'"):
        load_settings(
            directory=None,
            start=Path("/"),
            environ={**ENVIRON, "IMAGEFACTORY_INDEXES": "lab=https://x,lab=https://y"},
        )


def test_mirrors_read_alike_from_the_file_and_from_the_environment(tmp_path: Path) -> None:
    environ = trusted(
        tmp_path,
        'plain-http = "registry.example:5000, 10.0.0.1"\n'
        '[mirrors]\n"docker.io" = "registry.example:5000/hub"\n"quay.io/one" = "10.0.0.1"\n',
    )
    from_file = load_settings(directory=tmp_path, start=tmp_path, environ=environ)
    assert from_file.mirror_map == (("docker.io", "registry.example:5000/hub"), ("quay.io/one", "10.0.0.1"))
    assert from_file.plain_hosts == ("registry.example:5000", "10.0.0.1")
    assert from_file.mirrors.origin == str(tmp_path / "imagefactory.toml")
    given = {**ENVIRON, "IMAGEFACTORY_MIRRORS": "docker.io=registry.example:5000/hub, quay.io/one=10.0.0.1"}
    from_environment = load_settings(directory=None, start=Path("/"), environ=given)
    assert from_environment.mirror_map == from_file.mirror_map
    assert from_environment.mirrors.origin == "$IMAGEFACTORY_MIRRORS"


@pytest.mark.parametrize(
    ("value", "code", "named"),
    [
        ("docker.io", "setting-invalid", "'docker.io'"),
        ("docker.io=one.example,docker.io=two.example", "setting-duplicate", "'docker.io'"),
        ("docker.io=https://one.example", "setting-invalid", "'https://one.example'"),
    ],
)
def test_wrong_mirrors_of_the_environment(tmp_path: Path, value: str, code: str, named: str) -> None:
    with fails(code) as caught:
        load_settings(directory=tmp_path, start=tmp_path, environ={**ENVIRON, "IMAGEFACTORY_MIRRORS": value})
    assert named in caught.value.message
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
    environ = trusted(tmp_path, 'certificates = "site.pem"\n')
    (tmp_path / "site.pem").write_bytes(bundle.read_bytes())
    settings = load_settings(directory=tmp_path, start=Path("/"), environ=environ)
    assert settings.certificates_path == tmp_path / "site.pem"


def test_certificates_are_added_to_the_machine_s_for_the_index_and_uv(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the site only one is its own: what the machine trusted before, it trusts still, each once."""
    first, *others = PEM.findall(Path(certifi.where()).read_text())[:5]
    folder = tmp_path / "hashed"
    folder.mkdir()
    for name, text in {
        "site.pem": f"ours\n{first}\n",
        "machine.pem": f"# theirs\r\n{others[0]}\n{first}\n".replace("\n", "\r\n"),
        "requests.pem": others[1],
        "hashed/ab12cd34.0": others[2],
        "hashed/README": others[3],
    }.items():
        (tmp_path / name).write_bytes(text.encode())
    environ = {
        **ENVIRON,
        "SSL_CERT_FILE": str(tmp_path / "machine.pem"),
        "SSL_CERT_DIR": str(folder),
        "REQUESTS_CA_BUNDLE": str(tmp_path / "requests.pem"),
    }
    settings = load_settings(directory=tmp_path, start=tmp_path, environ=environ)
    found = find_index(settings.index, environ=environ, prefix=tmp_path, etc=tmp_path)
    cache = tmp_path / "cache"
    index = trusting(found, tmp_path / "site.pem", cache)
    assert set(PEM.findall(Path(index.certificates).read_text())) == {first, *others[:3]}
    ssl.create_default_context(cafile=index.certificates)
    assert dict(index.environment)["SSL_CERT_FILE"] == index.certificates
    assert "SSL_CERT_DIR" not in dict(index.environment)
    assert trusting(found, tmp_path / "site.pem", cache) == index
    assert [str(path) for path in cache.iterdir()] == [index.certificates]
    assert trusting(found, None, cache) == found
    # A machine without certificates: those that requests and uv bring along.
    nothing = replace(found, certificates="", environment=())
    bundled = Path(trusting(nothing, tmp_path / "machine.pem", cache).certificates).read_text()
    assert set(PEM.findall(bundled)) == set(PEM.findall(Path(certifi.where()).read_text()))


def test_apt_trusts_what_it_is_given(tmp_path: Path) -> None:
    assert 'Acquire::https::CaInfo "/a/b.pem";' in apt_config(tmp_path, "amd64", "/a/b.pem")
    assert "CaInfo" not in apt_config(tmp_path, "amd64")


def test_the_rows_of_engines_and_runners_name_what_is_there() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for row in (*ENGINES.values(), *RUNNERS.values()):
        assert importlib.util.find_spec(row.module) is not None
        assert row.extra in extras
    assert {row.runner for row in ENGINES.values()} <= RUNNERS.keys()


def test_every_setting_has_a_row_under_the_name_of_the_file(tmp_path: Path) -> None:
    settings = load_settings(directory=tmp_path, start=tmp_path, environ=ENVIRON)
    names = [name for name, _ in settings.rows()]
    assert {"root", "debian-mirror", "plain-http", "mirrors"} <= set(names)
    rows = [f'{name} = "{setting.value}"\n' for name, setting in settings.rows()[1:] if setting.value]
    environ = trusted(tmp_path, "".join(rows))
    again = load_settings(directory=tmp_path, start=tmp_path, environ=environ)
    assert [setting.value for _, setting in again.rows()] == [setting.value for _, setting in settings.rows()]


def test_the_command_prints_origins_and_no_password(tmp_path: Path) -> None:
    write_settings(tmp_path, 'index = "https://ann:hunter2@index.example/simple?key=x"\n')
    environ = {"IMAGEFACTORY_DEBIAN_MIRROR": "https://bob:hunter2@debian.example/debian"}
    ran = CliRunner().invoke(cli, ["-C", str(tmp_path), "config", "--json"], env=environ)
    assert ran.exit_code == 0, ran.output
    rows = {row["name"]: row for row in json.loads(ran.stdout)["settings"]}
    assert rows["index"]["value"] == "https://index.example/simple"
    assert rows["index"]["source"] == str(tmp_path / "imagefactory.toml")
    assert rows["debian-mirror"] == {
        "name": "debian-mirror",
        "value": "https://debian.example/debian",
        "source": "$IMAGEFACTORY_DEBIAN_MIRROR",
    }
    table = CliRunner().invoke(cli, ["-C", str(tmp_path), "config"], env=environ).stdout
    assert table.splitlines()[0].split() == ["NAME", "SOURCE", "VALUE"]
    assert len(table.splitlines()) == len(rows) + 1
    assert "hunter2" not in table


def test_a_misspelt_variable_is_refused_and_not_ignored(tmp_path: Path) -> None:
    with fails("setting-unknown", "IMAGEFACTORY_STOER"):
        load_settings(directory=tmp_path, start=tmp_path, environ={**ENVIRON, "IMAGEFACTORY_STOER": "/x"})


def test_build_takes_the_configured_engine(tmp_path: Path) -> None:
    environ = {
        "IMAGEFACTORY_STORE": str(tmp_path / "store"),
        "IMAGEFACTORY_CACHE": str(tmp_path / "cache"),
        "IMAGEFACTORY_ENGINE": "docker",
        "DOCKER_HOST": f"unix://{tmp_path}/docker.sock",
    }
    root = Path(__file__).parents[3]
    ran = CliRunner().invoke(cli, ["-C", str(root), "build", "pytorch-2.3-cu121"], env=environ)
    assert ran.exit_code == EXIT_TOOL, ran.output
    assert f"no docker daemon answers at unix://{tmp_path}/docker.sock" in ran.output


# --- the files of the user and of the site --------------------------------------------------------


def layered(folder: Path, **texts: str) -> dict[str, str]:
    """Writes `root`, `user`, `site` and `site2`, as far as they are given; the environment of such a call."""
    places = {name: folder / name / "imagefactory" for name in ("user", "site", "site2")}
    places["root"] = folder / "root"
    for name, path in places.items():
        path.mkdir(parents=True, exist_ok=True)
        if name in texts:
            (path / "imagefactory.toml").write_text(texts[name])
    return {
        "HOME": "/home/someone",
        "XDG_CONFIG_HOME": str(folder / "user"),
        "XDG_CONFIG_DIRS": f"{folder / 'site'}:relative:{folder / 'site2'}",
    }


def load_layered(folder: Path, **texts: str) -> Settings:
    environ = layered(folder, **texts)
    if "root" in texts:
        trust(folder / "root", environ)
    return load_settings(directory=folder / "root", start=folder, environ=environ)


def test_the_nearest_file_decides_and_is_told(tmp_path: Path) -> None:
    loaded = load_layered(
        tmp_path,
        root='registry = "root.example"\n',
        user='registry = "user.example"\nsite = "chtc"\n',
        site='registry = "site.example"\nsite = "ospool"\ncatalog = "site.example/gpu"\n',
        site2='catalog = "other.example"\nworkers = 3\n',
    )
    assert [(one.value, Path(one.origin).parts[-3]) for one in (loaded.site, loaded.catalog)] == [
        ("chtc", "user"),
        ("site.example/gpu", "site"),
    ]
    assert (loaded.registry.value, Path(loaded.registry.origin).parent.name) == ("root.example", "root")
    assert loaded.worker_count == 3
    assert [path.parts[-3] for path in loaded.files[1:]] == ["user", "site", "site2"]
    environ = {**layered(tmp_path), "IMAGEFACTORY_SITE": "generic"}
    assert load_settings(directory=None, start=tmp_path, environ=environ).site.origin == "$IMAGEFACTORY_SITE"


def test_a_table_comes_from_one_file_whole(tmp_path: Path) -> None:
    loaded = load_layered(
        tmp_path,
        user='[mirrors]\n"docker.io" = "user.example/hub"\n',
        site='[mirrors]\n"docker.io" = "site.example/hub"\n"quay.io" = "site.example/quay"\n',
    )
    assert loaded.mirror_map == (("docker.io", "user.example/hub"),)


def test_relative_paths_begin_where_they_are_written(tmp_path: Path) -> None:
    loaded = load_layered(
        tmp_path,
        root='store = "images"\n',
        user='signing-key = "./a.pem"\ncache = "~/c"\n',
        site='catalog = "./catalog.json"\nsif-folder = "sif"\n',
    )
    assert loaded.store_path == tmp_path / "root" / "images"
    assert loaded.signing_key.value == str(tmp_path / "user/imagefactory/a.pem")
    assert loaded.catalog.value == str(tmp_path / "site/imagefactory/catalog.json")
    assert loaded.sif_folder.value == str(tmp_path / "site/imagefactory/sif")


@pytest.mark.parametrize(
    "text", ["osdf:///chtc/staging/ann", "/staging/groups/lab_1/sif+x", "/home/ann/.images"]
)
def test_places_of_sif_files_are_taken_as_they_are(tmp_path: Path, text: str) -> None:
    assert load_layered(tmp_path, user=f'sif-folder = "{text}"').sif_folder.value == text


def test_without_files_the_defaults_say_so(tmp_path: Path, site_folders: str) -> None:
    loaded = load_layered(tmp_path)
    assert (loaded.site.value, loaded.site.origin) == ("generic", "default")
    assert (loaded.catalog.value, loaded.sif_folder.value) == ("", "")
    bare = load_settings(directory=tmp_path, start=tmp_path, environ=ENVIRON)
    assert [str(path) for path in bare.files[1:]] == [
        "/home/someone/.config/imagefactory/imagefactory.toml",
        f"{files.SITE_CONFIG_DIRS}/imagefactory/imagefactory.toml",
    ]
    assert site_folders == "/etc/xdg"


def test_settings_of_this_machine_reach_no_test() -> None:
    """What lies in a developer's own folders would decide, and hide what is missing in a test."""
    asked = load_settings(directory=None, start=Path("/"), environ=os.environ)
    assert len(asked.files) == 3
    assert all("no-settings" in str(path) for path in asked.files[1:])
    assert {setting.origin for name, setting in asked.rows() if name != "root"} == {"default"}


def test_without_a_factory_the_root_is_what_comes_with_the_program(tmp_path: Path) -> None:
    """Paths of the environment begin where the person stands: nobody can write to that root."""
    environ = {"HOME": str(tmp_path), "IMAGEFACTORY_STORE": "mine"}
    loaded = load_settings(directory=None, start=tmp_path, environ=environ)
    assert (loaded.root_path, loaded.root.origin) == (SHIPPED, "comes with imagefactory")
    assert loaded.shipped
    assert loaded.store_path == tmp_path / "mine"
    (tmp_path / "imagefactory.toml").touch()
    assert not load_settings(directory=None, start=tmp_path, environ=environ).shipped


def test_a_root_that_is_the_users_own_folder_is_read_once(tmp_path: Path) -> None:
    environ = layered(tmp_path, user="workers = 2\n")
    own = tmp_path / "user" / "imagefactory"
    loaded = load_settings(directory=own, start=own, environ=environ)
    assert len(loaded.files) == len(set(loaded.files)) == 3


@pytest.mark.parametrize("name", ["root", "user", "site", "site2"])
@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("stroe = 'x'", "setting-unknown"),
        ("site = ", "settings-file-invalid"),
        ("site = 'x'", "setting-invalid"),
        ("x" * 2_000_000, "settings-file-invalid"),
    ],
    ids=["unknown", "syntax", "value", "size"],
)
def test_a_wrong_file_is_named_whichever_it_is(tmp_path: Path, name: str, text: str, code: str) -> None:
    with fails(code) as caught:
        load_layered(tmp_path, **{name: text})
    assert str(tmp_path / name) in caught.value.message
    assert caught.value.hint


def test_a_folder_in_a_files_place_is_refused(tmp_path: Path) -> None:
    layered(tmp_path)
    (tmp_path / "user" / "imagefactory" / "imagefactory.toml").mkdir()
    with fails("cannot-read-file", re.escape(f"{tmp_path}/user")):
        load_layered(tmp_path)


# --- whom to believe ------------------------------------------------------------------------------


def row(key: SigningKey, name: str, until: str = "2099-01-01") -> str:
    public = base64.b64encode(key.public).decode("ascii")
    return (
        f'[[trust]]\nname = "{name}"\nkeyid = "{key.keyid}"\npublic = "{public}"\n'
        f"from = 2026-01-01\nuntil = {until}\n"
    )


def test_keys_of_all_files_count_the_nearest_row_of_each(tmp_path: Path) -> None:
    loaded = load_layered(
        tmp_path,
        user=row(LAB, "lab", "2026-06-01"),
        site=row(LAB, "our-lab") + row(STRANGER, "stranger"),
        site2=row(STRANGER, "lab"),
    )
    trust = read_trust(loaded.files)
    assert [(key.name, key.keyid, key.until.year) for key in trust.keys] == [
        ("lab", LAB.keyid, 2026),  # retired by its user, whatever the site says
        ("stranger", STRANGER.keyid, 2099),
    ]


def test_the_nearest_policy_counts_whole(tmp_path: Path) -> None:
    loaded = load_layered(
        tmp_path,
        user='[policy]\nevidence = ["local"]\n',
        site="[policy]\nexpires-days = 7\n" + row(LAB, "lab"),
    )
    trust = read_trust(loaded.files)
    assert (trust.policy.evidence, trust.policy.days) == ((EVIDENCE_LOCAL,), 90)
    assert trust.keys[0].evidence == (EVIDENCE_LOCAL,)
    only = read_trust(loaded.files[2:])
    assert only.policy.days == 7


@pytest.mark.parametrize("text", [row(LAB, "lab") * 2, "[policy]\nexpires-days = 0\n", "trust = 1\n"])
def test_rows_that_cannot_be_read_are_told_with_their_file(tmp_path: Path, text: str) -> None:
    loaded = load_layered(tmp_path, site=text)
    with pytest.raises(UsageError) as caught:
        read_trust(loaded.files)
    assert str(tmp_path / "site") in caught.value.message
