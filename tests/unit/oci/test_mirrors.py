"""A mirror changes the address of an image and nothing else."""

from __future__ import annotations

import pytest

from imagefactory.errors import UsageError
from imagefactory.oci.mirrors import resolve_mirror
from imagefactory.oci.store import parse_reference

DIGEST = "sha256:" + "ab" * 32
MIRRORS = (
    ("docker.io", "registry.example:5000/hub"),
    ("docker.io/nvidia", "gpu.example"),
    ("quay.io", "quay.example/all"),
)


@pytest.mark.parametrize(
    ("asked", "fetched"),
    [
        ("docker.io/library/python", "registry.example:5000/hub/library/python"),
        ("docker.io/nvidia/cuda", "gpu.example/cuda"),
        ("docker.io/nvidiagpu/cuda", "registry.example:5000/hub/nvidiagpu/cuda"),
        ("quay.io/one", "quay.example/all/one"),
        ("ghcr.io/one", "ghcr.io/one"),
        ("docker.io.example/one", "docker.io.example/one"),
    ],
)
def test_the_longest_prefix_of_whole_parts_wins(asked: str, fetched: str) -> None:
    reference = parse_reference(f"{asked}:12@{DIGEST}")
    found = resolve_mirror(reference, MIRRORS)
    assert str(found) == f"{fetched}:12@{DIGEST}"
    assert resolve_mirror(reference, ()) == reference


def test_a_whole_name_may_be_mapped() -> None:
    reference = parse_reference(f"docker.io/library/python@{DIGEST}")
    found = resolve_mirror(reference, (("docker.io/library/python", "registry.example/site/python"),))
    assert str(found) == f"registry.example/site/python@{DIGEST}"
    with pytest.raises(UsageError) as caught:
        resolve_mirror(reference, (("docker.io/library/python", "registry.example"),))
    assert caught.value.code == "mirror-invalid"


@pytest.mark.parametrize("host", ["docker.io", "index.docker.io", "registry-1.docker.io"])
@pytest.mark.parametrize("name", ["debian", "library/debian"])
def test_docker_hub_has_one_name(host: str, name: str) -> None:
    wanted = parse_reference(f"{host}/{name}:12")
    whole, official = (("docker.io", "m.example.org/hub"),), (("docker.io/library", "m.example.org/l"),)
    assert str(resolve_mirror(wanted, whole)) == "m.example.org/hub/library/debian:12"
    assert str(resolve_mirror(wanted, official)) == "m.example.org/l/debian:12"
