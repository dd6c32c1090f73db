"""Bases from a registry: what is read of an image, and what is kept of its config. Pulling is in engines/."""

# ruff: noqa: E501 -- one fault per line reads as a table
from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from imagefactory.build.base.image import BuiltBase
from imagefactory.build.base.pulled import (
    LAYER_TYPES,
    NEWEST,
    OLDEST,
    BasePullRequest,
    check_carried,
    parse_created,
    platform_manifest,
)
from imagefactory.build.definition import define
from imagefactory.build.layer_lock import format_config, inherited, merge_environment
from imagefactory.errors import BuildError, RegistryError
from imagefactory.http import RetryPolicy
from imagefactory.model import CommandResult, SourceLocation
from imagefactory.oci.graph import Manifest
from imagefactory.oci.layout import Layout
from imagefactory.oci.manifests import (
    INDEX_TYPE,
    LAYER_CODECS,
    MANIFEST_TYPE,
    Descriptor,
    Image,
    canonical_json,
    digest_of,
)
from imagefactory.oci.registry.client import RegistryClient
from imagefactory.oci.registry.session import RegistryOptions
from imagefactory.progress import QuietProgress
from tests.made.errors import fails
from tests.made.values import make_base, make_lock, make_target

DIGEST = "sha256:" + "0a" * 32
BASE = make_base(
    name="cuda-0a0a0a0a0a0a",
    suite="",
    packages=(),
    public=f"docker.io/nvidia/cuda@{DIGEST}",
    where=SourceLocation(file="recipes/pytorch.yaml", line=6, column=7),
    image=f"docker.io/nvidia/cuda:12@{DIGEST}",
)


@pytest.mark.parametrize(
    ("created", "epoch"),
    [
        ("2024-01-16T22:14:39Z", 1705443279),
        ("2024-01-16T22:14:39.836612803Z", 1705443279),
        ("2024-01-17T00:14:39+02:00", 1705443279),
        ("1970-01-01T00:00:00Z", OLDEST),
        ("0001-01-01T00:00:00Z", OLDEST),
        ("0001-01-01T00:00:00+14:00", OLDEST),
        ("9999-12-31T23:59:59Z", NEWEST),
        ("2024-13-16T22:14:39Z", OLDEST),
        ("yesterday", OLDEST),
        ("", OLDEST),
        (None, OLDEST),
        (1705443279, OLDEST),
    ],
)
def test_the_clock_of_an_image(created: object, epoch: int) -> None:
    assert parse_created(created) == epoch


def said(stdout: str, returncode: int = 0, stderr: str = "") -> CommandResult:
    return CommandResult(returncode=returncode, stdout=stdout, stderr=stderr, seconds=0.1)


@pytest.mark.parametrize("libc", ["glibc 2.36", "glibc 2.41", "glibc 2.36.9000", "glibc 3.0"])
def test_an_image_as_the_recipe_says(libc: str) -> None:
    check_carried(BASE, said(f"3.11\n{libc}\n"))


def test_an_image_of_which_no_python_is_said() -> None:
    bare = replace(BASE, python="")
    check_carried(bare, said("glibc 2.36\n"))
    with fails("base-glibc-mismatch", r"glibc 2\.31.* 2\.36"):
        check_carried(bare, said("glibc 2.31\n"))
    for probed in (said("", 127), said("undefined\n", 1), said("")):
        with fails("base-without-glibc"):
            check_carried(bare, probed)


@pytest.mark.parametrize(
    ("probed", "code", "named", "hint"),
    [
        (said("", 127, "exec: not found\n"), "base-python-missing", "/usr/bin/python3.11: exec: not found", "interpreter:"),
        (said("hello\n"), "base-python-missing", "/usr/bin/python3.11", "interpreter:"),
        (said("3.12\nglibc 2.36\n"), "base-python-mismatch", "Python 3.12", 'write python: "3.12"'),
        (said("3.11\nglibc 2.31\n"), "base-glibc-mismatch", "glibc 2.31", 'write glibc: "2.31"'),
        (said("3.11\nglibc 2.4\n"), "base-glibc-mismatch", "glibc 2.4", 'write glibc: "2.4"'),
        (said("3.11\nanother C library than glibc\n"), "base-without-glibc", "another C library", "glibc"),
    ],
)  # fmt: skip
def test_an_image_that_is_not_as_the_recipe_says(
    probed: CommandResult, code: str, named: str, hint: str
) -> None:
    with pytest.raises(BuildError) as caught:
        check_carried(BASE, probed)
    assert caught.value.message.startswith(f"recipes/pytorch.yaml:6:7: {BASE.image} ")
    assert caught.value.code == code
    assert named in caught.value.message
    assert hint in caught.value.hint


def index_of(*platforms: tuple[str, str], attested: bool = False) -> Manifest:
    entries = [
        {
            "mediaType": MANIFEST_TYPE,
            "digest": f"sha256:{number:064d}",
            "size": 10,
            "platform": {"os": system, "architecture": architecture},
        }
        for number, (system, architecture) in enumerate(platforms)
    ]
    if attested:
        entries.insert(0, {
            "mediaType": MANIFEST_TYPE, "digest": f"sha256:{9:064d}", "size": 10,
            "platform": {"os": "unknown", "architecture": "unknown"},
            "annotations": {"vnd.docker.reference.type": "attestation-manifest"},  # type: ignore[dict-item]
        })  # fmt: skip
    data = canonical_json({"schemaVersion": 2, "mediaType": INDEX_TYPE, "manifests": entries})
    descriptor = Descriptor(media_type=INDEX_TYPE, digest=digest_of(data), size=len(data))
    return Manifest(descriptor=descriptor, data=data)


def test_of_an_index_the_platforms_manifest() -> None:
    assert (
        platform_manifest(index_of(("linux", "arm64"), ("linux", "amd64")), "linux/amd64")
        == f"sha256:{1:064d}"
    )
    assert platform_manifest(index_of(("linux", "amd64")), "linux/amd64") == f"sha256:{0:064d}"
    assert platform_manifest(index_of(("linux", "amd64"), attested=True), "linux/amd64") == f"sha256:{0:064d}"
    with pytest.raises(RegistryError, match="no image for linux/amd64"):
        platform_manifest(index_of(("linux", "arm64"), ("windows", "amd64")), "linux/amd64")
    plain = Manifest(descriptor=Descriptor(media_type=MANIFEST_TYPE, digest=DIGEST, size=2), data=b"{}")
    assert platform_manifest(plain, "linux/amd64") == DIGEST


def test_dockers_layers_have_a_name_of_the_specification_and_can_be_unpacked() -> None:
    assert set(LAYER_TYPES) <= set(LAYER_CODECS)
    for theirs, ours in LAYER_TYPES.items():
        assert LAYER_CODECS[theirs] == LAYER_CODECS[ours]
        assert ours.startswith("application/vnd.oci.image.layer.v1.tar")


def test_a_registry_that_is_not_there_is_named_with_the_mirror(tmp_path: Path) -> None:
    def open_registry(host: str) -> RegistryClient:
        return RegistryClient(host, RegistryOptions(retry_policy=RetryPolicy(attempts=1)))

    layout = Layout(tmp_path / "store")
    wanted = BasePullRequest(
        base=BASE, mirrors=(("docker.io", "127.0.0.1:1/hub"),), open_registry=open_registry
    )
    with layout.in_use(QuietProgress()), fails("mirror-failed") as caught:
        wanted.find(layout, QuietProgress())
    assert caught.value.message.startswith(f"recipes/pytorch.yaml:6:7: {BASE.image}: ")
    assert "127.0.0.1:1/hub/nvidia/cuda" in caught.value.message
    assert "docker.io" in caught.value.hint
    assert layout.tags() == {}


# --- what is built on it ---------------------------------------------------------------------------


def base_image(*environment: tuple[str, str]) -> BuiltBase:
    image = Image(
        name="base:x", digest=DIGEST, manifest=DIGEST, config=DIGEST, size=0, layers=(), environment=environment
    )  # fmt: skip
    return BuiltBase(image=image, folders=(), identity="x", epoch=0, published=True)


def test_the_bases_variables_stand_below_ours() -> None:
    pulled = make_base(suite="", packages=(), image=f"x.org/y@sha256:{'0' * 64}")
    definition = define(make_target(), pulled, make_lock())
    base = base_image(
        ("PATH", "/usr/local/cuda/bin:/usr/bin:bin::/bin"),
        ("LD_LIBRARY_PATH", "/usr/local/cuda/lib64"),
        ("LANG", "de_DE.UTF-8"),
        ("PYTHONPATH", "/evil"),
        ("PYTHONHOME", "/evil"),
        ("PYTHON_VERSION", "3.11.9"),
        ("", "nameless"),
        ("A B", "no name"),
    )
    merged = merge_environment(definition, base)
    assert [name for name, _ in merged] == [
        *dict(definition.environment), "LD_LIBRARY_PATH", "PYTHON_VERSION",
    ]  # fmt: skip
    values = dict(merged)
    assert values["PATH"] == f"{dict(definition.environment)['PATH']}:/usr/local/cuda/bin"
    assert values["LANG"] == "C.UTF-8"
    assert inherited(base.image.environment)[:2] == (
        ("LD_LIBRARY_PATH", "/usr/local/cuda/lib64"),
        ("LANG", "de_DE.UTF-8"),
    )


def test_the_factorys_own_base_changes_nothing() -> None:
    definition = define(make_target(), make_base(), make_lock())
    own = base_image(("PATH", "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"))
    assert merge_environment(definition, own) == definition.environment


def test_nothing_else_of_the_bases_config_is_kept() -> None:
    definition = define(make_target(), make_base(), make_lock())
    config = format_config(definition, base_image(("A", "1")), [])
    held = config["config"]
    assert isinstance(held, dict)
    assert set(held) == {"Env", "Cmd", "WorkingDir", "Labels"}
    assert "A=1" in held["Env"]
    assert json.dumps(held["Labels"]) == json.dumps(dict(definition.labels))


def test_the_place_of_python_decides_what_is_found() -> None:
    """Two recipes may say of one image where its Python is; what was tried for one is not for the other."""
    from imagefactory.build.base.pulled import _key

    keys = {
        _key(BASE),
        _key(replace(BASE, interpreter="/usr/local/bin/python3.11")),
        _key(replace(BASE, glibc="2.31")),
        _key(replace(BASE, python="3.12")),
    }
    assert len(keys) == 4
    assert _key(BASE) == _key(replace(BASE, name="cuda", image=BASE.public))
