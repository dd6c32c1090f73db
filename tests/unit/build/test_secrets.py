"""What a build is told of this machine, and that nobody else is."""

from __future__ import annotations

import configparser
import json
from dataclasses import replace
from pathlib import Path

import pytest

from imagefactory.build import secrets
from imagefactory.build.conda_install import Failure
from imagefactory.build.secrets import BuildSecrets, find_secrets, linker_failure
from imagefactory.errors import UsageError
from imagefactory.lock.conda.channels import ChannelAccess, ContainerChannels
from imagefactory.lock.pypi.index import PackageIndex
from tests.made.errors import fails

PLAIN = PackageIndex(url="", origin="uv's default", certificates="", proxy="", environment=())


def conf(secrets: BuildSecrets) -> dict[str, str]:
    parser = configparser.RawConfigParser()
    parser.read_string(secrets.pip_conf)
    return dict(parser.items("global"))


def test_a_machine_without_settings_tells_nothing(tmp_path: Path) -> None:
    secrets = find_secrets(PLAIN, {"HOME": str(tmp_path)})
    assert conf(secrets) == {}
    assert not secrets.loopback
    assert secrets.hide("all of this stays") == "all of this stays"


def test_index_with_a_password_stands_in_pip_conf_alone(tmp_path: Path) -> None:
    url = "https://ada:s%3Acret@mirror.example.org/simple"
    secrets = find_secrets(replace(PLAIN, url=url), {"HOME": str(tmp_path)})
    assert conf(secrets) == {"index-url": url}
    assert "s%3Acret" not in repr(secrets)
    shown = secrets.hide(f"Looking in {url}, password s:cret, coded s%3Acret")
    assert shown == "Looking in https://mirror.example.org/simple, password ****, coded ****"


def test_named_indexes_stand_beside_the_usual_one(tmp_path: Path) -> None:
    (tmp_path / ".netrc").write_text("machine lab.example.org login ada password s3cret\n")
    named = (("cu128", "https://cu128.example.org/simple"), ("lab", "http://lab.example.org/simple"))
    secrets = find_secrets(replace(PLAIN, named=named), {"HOME": str(tmp_path)})
    assert conf(secrets) == {
        "extra-index-url": "https://cu128.example.org/simple http://ada:s3cret@lab.example.org/simple",
        "trusted-host": "lab.example.org",
    }
    assert secrets.hide("s3cret") == "****"
    assert find_secrets(replace(PLAIN, named=(("lab", "http://127.0.0.1:1/simple"),)), {}).loopback
    with fails("index-is-directory", r"file:///srv/lab \('lab'\)"):
        find_secrets(replace(PLAIN, named=(("lab", "file:///srv/lab"),)), {})


def test_user_alone_is_a_token(tmp_path: Path) -> None:
    url = "https://tok3n@mirror.example.org/simple"
    assert find_secrets(replace(PLAIN, url=url), {}).hide("tok3n") == "****"


def test_netrc_speaks_for_the_index(tmp_path: Path) -> None:
    (tmp_path / ".netrc").write_text("machine mirror.example.org login ada password p@ss/word\n")
    secrets = find_secrets(replace(PLAIN, url="https://mirror.example.org/simple"), {"HOME": str(tmp_path)})
    assert conf(secrets) == {"index-url": "https://ada:p%40ss%2Fword@mirror.example.org/simple"}
    assert secrets.hide("p@ss/word and p%40ss%2Fword") == "**** and ****"
    named = find_secrets(
        replace(PLAIN, url="https://other.example.org/simple"), {"NETRC": str(tmp_path / ".netrc")}
    )
    assert conf(named) == {"index-url": "https://other.example.org/simple"}


def test_broken_netrc_is_named_without_its_content(tmp_path: Path) -> None:
    (tmp_path / ".netrc").write_text("machine x hunter2 hunter2\n")
    with pytest.raises(UsageError) as caught:
        find_secrets(replace(PLAIN, url="https://x/simple"), {"HOME": str(tmp_path)})
    assert str(tmp_path / ".netrc") in caught.value.message
    assert "hunter2" not in caught.value.message + caught.value.hint


@pytest.mark.parametrize(
    ("url", "loopback"),
    [
        ("http://127.0.0.1:3141/simple", True),
        ("http://127.8.0.1/simple", True),
        ("http://localhost:80/simple", True),
        ("http://[::1]:80/simple", True),
        ("http://mirror.example.org/simple", False),
        ("https://localhost.example.org/simple", False),
    ],
)
def test_loopback_is_seen(url: str, loopback: bool) -> None:
    assert find_secrets(replace(PLAIN, url=url), {}).loopback is loopback


def test_plain_http_and_insecure_hosts_are_trusted() -> None:
    environment = (("UV_INSECURE_HOST", "a.example.org, b.example.org"),)
    index = replace(PLAIN, url="http://ada:pw@mirror.example.org:81/simple", environment=environment)
    assert (
        conf(find_secrets(index, {}))["trusted-host"] == "mirror.example.org:81 a.example.org b.example.org"
    )
    secure = replace(PLAIN, url="https://mirror.example.org/simple")
    assert "trusted-host" not in conf(find_secrets(secure, {}))


def test_proxy_with_a_password() -> None:
    environment = (
        ("https_proxy", "http://ada:pr0xy@proxy.example.org:3128"),
        ("no_proxy", "near.example.org"),
    )
    index = replace(PLAIN, url="https://mirror.example.org/simple", environment=environment)
    secrets = find_secrets(index, {})
    assert conf(secrets)["proxy"] == "http://ada:pr0xy@proxy.example.org:3128"
    assert secrets.hide("pr0xy") == "****"
    for direct in ("https://near.example.org/simple", "https://x.near.example.org/", "https://127.0.0.1/"):
        assert "proxy" not in conf(find_secrets(replace(index, url=direct), {}))
    inside = replace(index, environment=(("HTTPS_PROXY", "http://127.0.0.1:3128"),))
    assert find_secrets(inside, {}).loopback


def test_folder_index_is_refused(tmp_path: Path) -> None:
    with fails("index-is-directory", message="imagefactory.toml", hint="assemble"):
        find_secrets(replace(PLAIN, url=tmp_path.as_uri(), origin="imagefactory.toml"), {})


def test_line_end_in_an_address_is_refused() -> None:
    with fails("index-invalid"):
        find_secrets(replace(PLAIN, url="https://x.example.org/simple\ncert = /x"), {})


def test_certificates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bundle = tmp_path / "bundle.pem"
    bundle.write_bytes(b"PEM")
    assert find_secrets(replace(PLAIN, certificates=str(bundle)), {}).certificates == b"PEM"
    monkeypatch.setattr(secrets, "DEBIAN_BUNDLE", tmp_path / "debian.crt")
    assert find_secrets(PLAIN, {}).certificates is None
    (tmp_path / "debian.crt").write_bytes(b"DEBIAN")
    assert find_secrets(replace(PLAIN, certificates=str(tmp_path)), {}).certificates == b"DEBIAN"
    bundle.write_bytes(b"x" * (secrets.LARGEST_SECRET + 1))
    with fails("certificates-too-large", r"bundle\.pem"):
        find_secrets(replace(PLAIN, certificates=str(bundle)), {})


def test_channels_stand_in_a_file_of_their_own(tmp_path: Path) -> None:
    known = ChannelAccess(
        mirrors=(("https://conda.anaconda.org/made", "http://127.0.0.1:81/made"),),
        credentials=(("127.0.0.1", {"BearerToken": "t0ken/x"}),),
    )
    secrets = find_secrets(PLAIN, {}, known.site(["https://conda.anaconda.org/made"]))
    assert json.loads(secrets.channels) == {
        "mirrors": {"https://conda.anaconda.org/made": "http://127.0.0.1:81/made"},
        "auth": {"127.0.0.1": {"BearerToken": "t0ken/x"}},
        "proxies": {},
    }
    assert secrets.loopback
    assert "t0ken" not in repr(secrets)
    assert secrets.hide("t0ken/x or t0ken%2Fx") == "**** or ****"
    secrets.write(tmp_path)
    assert (tmp_path / "channels.json").read_text() == secrets.channels
    assert (tmp_path / "channels.json").stat().st_mode & 0o777 == 0o600
    assert not find_secrets(PLAIN, {}).channels


def test_channels_are_asked_through_this_machines_proxies() -> None:
    build_secrets = ContainerChannels(text='{"mirrors": {}, "auth": {}}', hidden=(), loopback=False)
    environ = {"HTTPS_PROXY": "http://ada:pr0xy@127.0.0.1:3128", "no_proxy": "near.example.org"}
    secrets = find_secrets(PLAIN, environ, build_secrets)
    assert json.loads(secrets.channels)["proxies"] == {
        "https_proxy": "http://ada:pr0xy@127.0.0.1:3128",
        "no_proxy": "near.example.org",
    }
    assert secrets.loopback
    assert secrets.hide("pr0xy") == "****"
    assert not find_secrets(PLAIN, environ).loopback  # nothing in the build asks it


def test_what_the_linker_said_is_found_among_a_builds_lines() -> None:
    failure = str(Failure("fetch", 'https://x/a.conda: "odd" \\ größe', ["a.conda"]))
    message, hint = linker_failure(f"#7 0.3 step\n#7 0.4 {failure}\n#7 ERROR: exit code 1") or ("", "")
    assert message == 'https://x/a.conda: "odd" \\ größe'
    assert "The setting `channels`" in hint
    script = str(Failure("script", "the script of x ended with 3: " + 'ab"\n' * 200, ["x"]))
    for end in range(200, 220):  # logs cut long lines, also within an escape
        message, hint = linker_failure(script[:end]) or ("", "")
        assert message.startswith("the script of x ended with 3: ab")
    assert linker_failure("no JSON here") is None


def test_written_for_this_user_alone(tmp_path: Path) -> None:
    secrets = BuildSecrets(pip_conf="[global]\n", certificates=b"PEM", loopback=False, hidden=())
    secrets.write(tmp_path)
    assert {path.name: path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {
        "pip.conf": 0o600,
        "ca.pem": 0o600,
    }
    replace(secrets, certificates=None).write(tmp_path)
    assert (tmp_path / "pip.conf").read_text() == "[global]\n"
