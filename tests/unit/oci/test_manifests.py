"""What two tools could read in two ways is not read at all."""

from __future__ import annotations

import json

import pytest

from imagefactory.errors import NoPlatformError, RegistryError
from imagefactory.oci.graph import Place, read_manifest
from imagefactory.oci.manifests import (
    ATTESTATION,
    INDEX_TYPE,
    MANIFEST_TYPE,
    choose_image,
    digest_of,
    media_type_of,
    parse_config,
    read_json,
)
from imagefactory.oci.registry.client import Registry
from tests.made.registry import RegistryMadeHere, Repository

DIFF_ID = "sha256:" + "1" * 64


@pytest.mark.parametrize(
    "text",
    [
        '{"layers": [1], "layers": [2]}',
        '{"layers": [1], "Layers": [2]}',
        '{"layers": [1], "layer\u017f": [2]}',  # Go folds a long s, and the Kelvin sign
        '{"\u212aey": 1, "key": 2}',
        '{"layers": [{"digest": "a", "Digest": "b"}]}',
        '{"platform": {"architecture": "amd64", "ARCHITECTURE": "arm64"}}',
        '{"annotations": {"a": "1", "a": "2"}}',
        '{"manifests": [{"platform": {"OS": "linux", "Architecture": "amd64"}}]}',
        '{"manifests": [{"Platform": {"os": "linux"}}]}',
        '{"config": {"env": ["LD_PRELOAD=/x"]}}',
    ],
)
def test_a_name_in_two_spellings_is_rejected(text: str) -> None:
    with pytest.raises(ValueError, match=r"key|spells"):
        read_json(text.encode())


def test_the_keys_of_maps_are_a_persons_own() -> None:
    for name in ("annotations", "Labels", "ExposedPorts", "Volumes"):
        value = {name: {"Maintainer": "a", "maintainer": "b"}}
        assert read_json(json.dumps(value).encode()) == value


@pytest.mark.parametrize("image", [{"config": {}}, {"layers": []}, {"config": {}, "layers": []}])
@pytest.mark.parametrize("told", [{}, {"mediaType": INDEX_TYPE}, {"mediaType": MANIFEST_TYPE}])
def test_an_index_is_no_image(image: dict[str, object], told: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="at once"):
        media_type_of({"manifests": [], **image, **told})


def test_a_config_with_two_lists_of_layers_is_rejected() -> None:
    text = f'{{"rootfs": {{"diff_ids": ["{DIFF_ID}"]}}, "RootFS": {{"diff_ids": []}}}}'
    with pytest.raises(ValueError, match="key"):
        parse_config(text.encode(), 1)


def test_what_is_attested_of_an_image_has_no_platform() -> None:
    def entry(number: int, system: str = "linux", processor: str = "arm64") -> dict[str, object]:
        digest = "sha256:" + str(number) * 64
        platform = {"platform": {"os": system, "architecture": processor}} if system else {}
        return {"mediaType": MANIFEST_TYPE, "digest": digest, "size": 1, **platform}

    unknown = entry(2, "unknown", "unknown")
    noted = {**unknown, "annotations": {ATTESTATION: "attestation-manifest"}}
    for attested in (unknown, noted):
        assert choose_image("a", [entry(1), attested]).digest == "sha256:" + "1" * 64
        assert choose_image("a", [attested, entry(1), entry(3, "linux", "amd64")]).digest[7] == "3"
    assert choose_image("a", [unknown]).digest[7] == "2"  # some builders call every image so
    for none in ([noted], [entry(1), entry(2)], [entry(1, ""), entry(2, "")], []):
        with pytest.raises(NoPlatformError):
            choose_image("a", none)


@pytest.mark.parametrize("told", [{}, {"mediaType": MANIFEST_TYPE}])
def test_a_registry_that_calls_an_image_an_index_is_not_believed(
    registry: RegistryMadeHere, told: dict[str, str]
) -> None:
    """Docker and podman go by the header: they would take something else."""
    blob = {"mediaType": "application/vnd.oci.image.config.v1+json", "digest": DIFF_ID, "size": 1}
    data = json.dumps({"schemaVersion": 2, "config": blob, "layers": [], **told}).encode()
    there = registry.shelves.repositories.setdefault("one", Repository())
    there.manifests[digest_of(data)] = (INDEX_TYPE, data)
    with pytest.raises(RegistryError, match="header"):
        read_manifest(Place(store=Registry(registry.host), repository="one"), digest_of(data))
    there.manifests[digest_of(data)] = (MANIFEST_TYPE, data)
    assert read_manifest(Place(store=Registry(registry.host), repository="one"), digest_of(data)).data == data
