"""The exact text of the most important errors of the store, registries and runners."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from imagefactory.errors import ImagefactoryError
from imagefactory.fs import no_space
from imagefactory.http import RejectedError
from imagefactory.model import Mount, RunSpec
from imagefactory.oci.candidates import check_tag
from imagefactory.oci.layout import Layout
from imagefactory.oci.manifests import Descriptor, choose_image
from imagefactory.oci.registry.session import RegistryOptions, RegistrySession
from imagefactory.oci.store import parse_reference
from imagefactory.oci.tar_stream import EntryError, layer_error
from imagefactory.runtime import docker, unshare
from imagefactory.runtime.limits import parse_limits
from imagefactory.runtime.protocol import check_spec, planned_mounts

DIGEST = "sha256:" + "a" * 64
REBUILD = "build the image again (imagefactory build TARGET), or pull it again"


def denied() -> None:
    session = RegistrySession("registry.example.org", RegistryOptions())
    with session.reporting("site/pytorch", "listing its tags"):
        raise RejectedError("403 DENIED", status=403)


def returned(error: ImagefactoryError) -> None:
    raise error


@pytest.mark.parametrize(
    ("call", "code", "message", "hint"),
    [
        (
            lambda: returned(no_space(Path("/store"))),
            "disk-full",
            "no space left in /store",
            "free some space (imagefactory image prune), then run the same command again",
        ),
        (
            lambda: Layout(Path("/none")).read(Descriptor(media_type="", digest=DIGEST, size=1)),
            "blob-missing",
            f"blob {DIGEST} is missing from /none",
            REBUILD,
        ),
        (
            lambda: choose_image("a:1", []),
            "store-platform-missing",
            "a:1 has no image for linux/amd64, only for nothing",
            "run imagefactory image remove a:1",
        ),
        (
            lambda: returned(layer_error("torch", EntryError("'../x' is outside the layer"))),
            "layer-entry-unsafe",
            "layer torch has an unsafe entry: '../x' is outside the layer",
            "rebuild the image without this file",
        ),
        (
            lambda: parse_reference("pytorch:2.3"),
            "reference-incomplete",
            "'pytorch:2.3' has no registry host",
            "add the host, such as registry.example.org/pytorch:2.3-cu121",
        ),
        (
            lambda: check_tag("2.3-cu121", ["2.3-cu121"]),
            "tag-reserved",
            "--tag 2.3-cu121: '2.3-cu121' is the tag of a verified target: only promotion moves it",
            "choose another name, such as 'nightly'",
        ),
        (
            denied,
            "registry-access-denied",
            "registry.example.org/site/pytorch: listing its tags: 403 DENIED",
            "log in with an account that has access to site/pytorch: docker login registry.example.org",
        ),
        (
            lambda: returned(unshare.explain("user-namespace", 1, "Operation not permitted")),
            "user-namespaces-denied",
            "this machine does not allow user namespaces (user-namespace: Operation not permitted)",
            "run imagefactory doctor: it shows the setting and the command that changes it",
        ),
        (
            lambda: returned(unshare.explain("workdir", 2, "/x")),
            "workdir-not-found",
            "the image does not have the workdir: /x",
            "pass --workdir with a directory of the image",
        ),
        (
            lambda: returned(docker.explain("bind source path does not exist: /x")),
            "mount-failed",
            "cannot mount a path inside the image: bind source path does not exist: /x",
            "check the paths of --mount",
        ),
        (
            lambda: check_spec(RunSpec(argv=())),
            "command-missing",
            "there is no command to run",
            "write the command after `--`",
        ),
        (
            lambda: planned_mounts(RunSpec(argv=("a",), mounts=(Mount(source=Path("/a"), target="/dev/x"),))),
            "mount-invalid",
            "mount target '/dev/x' is reserved for the sandbox",
            "choose one that is not below /proc, /sys, /dev",
        ),
        (
            lambda: parse_limits(["memory=1X"]),
            "option-invalid",
            "--limit memory=1X is not a valid amount",
            "write processes=4096, memory=16G, files=65536, scratch=50G or time=2h; "
            "NAME=none removes a limit",
        ),
    ],
)
def test_messages(call: Callable[[], object], code: str, message: str, hint: str) -> None:
    with pytest.raises(ImagefactoryError) as caught:
        call()
    assert (caught.value.code, caught.value.message, caught.value.hint) == (code, message, hint)
