"""push, pull, image copy, list and prune: the command line in this process, a registry in it too."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterator
from copy import deepcopy
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from imagefactory import errors
from imagefactory.cli.store import parse_age
from imagefactory.errors import UsageError
from imagefactory.oci.candidates import PUSHED_TYPE
from imagefactory.oci.graph import ManifestGraph, StoreRepository, read_graph
from imagefactory.oci.layout import (
    Layout,
    LayoutStore,
)
from imagefactory.oci.manifests import (
    CONFIG_TYPE,
    INDEX_TYPE,
    MANIFEST_TYPE,
    Descriptor,
    SifArtifact,
    canonical_json,
    digest_of,
    format_descriptor,
)
from imagefactory.oci.registry.client import RegistryClient
from imagefactory.oci.sif import SifOrigin, store_sif
from imagefactory.progress import QuietProgress
from tests.made.command import Call, json_of
from tests.made.families import candidate_of, put_index, stored_image
from tests.made.registry import PASSWORD, USER, RegistryMadeHere, Ways, registry_made_here
from tests.made.store_contract import CONFIGS_THAT_ARE_NONE, image_manifest, odd_image, put_blob

ROOT = Path(__file__).parents[3]


@pytest.fixture
def call(call_families: Call) -> Call:
    return call_families


@pytest.fixture
def graph(tmp_path: Path) -> ManifestGraph:
    return stored_image(tmp_path / "store", "one", [b"a" * 5000, b"b" * 100])


def push(call: Call, registry: RegistryMadeHere, *arguments: str, path: str = "/site") -> Any:
    said = call("push", "--json", "--registry", registry.host + path, *arguments)
    return json_of(said, "push")["results"]


# --- push ----------------------------------------------------------------------------------------


def test_push_writes_the_candidate_and_says_what_the_registry_confirmed(
    call: Call, registry: RegistryMadeHere, graph: ManifestGraph
) -> None:
    (row,) = push(call, registry, "one-12.1-cu121", "--tag", "nightly")
    digest, tag = graph.root.descriptor.digest, candidate_of(graph)
    assert (row["target"], row["digest"], row["tag"]) == ("one-12.1-cu121", digest, tag)
    assert row["reference"] == f"{registry.host}/site/one:{tag}@{digest}"
    assert row["tags"] == {"nightly": digest}
    assert row["blobs"] == {"sent": 4, "mounted": 0, "present": 0}
    assert row["bytes_sent"] >= graph.size
    there = registry.find("site/one")
    assert there.tags == {tag: digest, "nightly": digest}
    assert there.manifests[digest][1] == graph.root.data
    assert "12.1-cu121" not in there.tags


def test_push_again_sends_nothing(call: Call, registry: RegistryMadeHere, graph: ManifestGraph) -> None:
    push(call, registry, "one-12.1-cu121")
    registry.log.clear()
    before = registry.bytes_in
    (row,) = push(call, registry, "one-12.1-cu121")
    assert (row["bytes_sent"], row["blobs"]["present"]) == (0, 4)
    assert {asked.method for asked in registry.log} <= {"GET", "HEAD"}
    assert registry.bytes_in == before


def test_push_again_heals_a_candidate_whose_platform_was_deleted(
    call: Call, registry: RegistryMadeHere, graph: ManifestGraph
) -> None:
    push(call, registry, "one-12.1-cu121", path="")
    child = graph.manifests[0].descriptor.digest
    del registry.find("one").manifests[child]
    (row,) = push(call, registry, "one-12.1-cu121", path="")
    assert (row["digest"], row["blobs"]["present"]) == (graph.root.descriptor.digest, 4)
    assert child in registry.find("one").manifests
    assert pulled(call, row["reference"])["digest"] == row["digest"]


def test_push_speaks_to_a_person_too(call: Call, registry: RegistryMadeHere, graph: ManifestGraph) -> None:
    said = call("push", "--registry", registry.host, "one-12.1-cu121")
    assert f"{registry.host}/one:{candidate_of(graph)}" in said.out
    assert "confirmed by the registry" in said.out
    again = call("push", "--registry", registry.host, "one-12.1-cu121")
    assert "nothing: all 4 blobs were there" in again.out


def test_what_is_not_built_is_said_and_its_siblings_are_pushed(
    call: Call, registry: RegistryMadeHere, graph: ManifestGraph
) -> None:
    said = call("push", "--json", "--registry", registry.host, "one-*", "two-*", code=errors.EXIT_BUILD)
    value = json_of(said, "push")
    assert [row["target"] for row in value["results"]] == ["one-12.1-cu121"]
    assert {row["target"] for row in value["errors"]} == {"one-12.4-cu124", "two-12.1-cu121"}
    assert "imagefactory build two-12.1-cu121" in said.err


def test_without_a_registry_push_says_what_to_set(call: Call, graph: ManifestGraph) -> None:
    said = call("push", "one-12.1-cu121", code=errors.EXIT_USAGE)
    assert "--registry" in said.err
    assert "registry =" in said.err


def test_the_registry_of_the_settings_is_used(
    call: Call, registry: RegistryMadeHere, graph: ManifestGraph, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("IMAGEFACTORY_REGISTRY", f"{registry.host}/a/b")
    call("push", "one-12.1-cu121")
    assert registry.find("a/b/one").tags
    call("pull", f"{registry.host}/a/b/one:{candidate_of(graph)}", store="fresh")
    assert f"one:{candidate_of(graph)}" in call("image", "list", store="fresh").out.split()


@pytest.mark.parametrize(
    ("tag", "why"),
    [
        ("12.1-cu121", "only promotion"),
        ("12.4-cu124", "only promotion"),
        ("12.1-cu121-sm80", "GPU"),
        ("12.1-cu121-0123456789ab", "candidate"),
        ("sha256-" + "0" * 64, "referrers"),
        ("a b", "not a valid tag"),
    ],
)
def test_push_sets_no_tag_that_is_not_its_to_set(
    call: Call, registry: RegistryMadeHere, graph: ManifestGraph, tag: str, why: str
) -> None:
    said = call("push", "--registry", registry.host, "--tag", tag, "one-12.1-cu121", code=errors.EXIT_USAGE)
    assert why in said.err
    assert not registry.shelves.blobs


def test_one_tag_for_two_targets_of_a_family_is_refused(call: Call, registry: RegistryMadeHere) -> None:
    said = call("push", "--registry", registry.host, "--tag", "x", "one-*", code=errors.EXIT_USAGE)
    assert said.error_codes == ("option-conflict",)
    assert "--tag" in said.err


def test_a_second_family_takes_shared_layers_from_the_first(
    call: Call, registry: RegistryMadeHere, tmp_path: Path, graph: ManifestGraph
) -> None:
    stored_image(tmp_path / "store", "two", [b"a" * 5000, b"c" * 100])
    first, second = push(call, registry, "one-12.1-cu121", "two-12.1-cu121")
    assert first["blobs"] == {"sent": 4, "mounted": 0, "present": 0}
    assert second["blobs"] == {"sent": 2, "mounted": 2, "present": 0}


def test_a_registry_that_refuses_ends_with_8_and_no_tag(
    call: Call, registry: RegistryMadeHere, graph: ManifestGraph
) -> None:
    registry.fault = lambda asked: "403" if str(asked) == "PUT manifest" else None
    said = call("push", "--json", "--registry", registry.host, "one-12.1-cu121", code=errors.EXIT_REGISTRY)
    assert json_of(said, "push")["results"] == []
    assert registry.find("one").tags == {}
    registry.fault = None
    (row,) = push(call, registry, "one-12.1-cu121", path="")
    assert row["blobs"]["present"] == 4


def test_a_candidate_of_the_same_name_and_another_digest_is_not_overwritten(
    call: Call, registry: RegistryMadeHere, tmp_path: Path, graph: ManifestGraph
) -> None:
    stored_image(tmp_path / "store", "two", [b"other"])
    (row,) = push(call, registry, "two-12.1-cu121", path="")
    there = registry.find("two")
    registry.repository("one").manifests.update(there.manifests)
    registry.repository("one").tags[candidate_of(graph)] = row["digest"]
    said = call("push", "--registry", registry.host, "one-12.1-cu121", code=errors.EXIT_REGISTRY)
    assert row["digest"] in said.err
    assert registry.find("one").tags == {candidate_of(graph): row["digest"]}


@pytest.mark.parametrize("auth", ["basic", "token"])
def test_credentials_are_dockers_own_and_are_never_shown(
    call: Call, tmp_path: Path, graph: ManifestGraph, auth: str
) -> None:
    with registry_made_here(Ways(auth=auth)) as registry:
        said = call("push", "--registry", registry.host, "one-12.1-cu121", code=errors.EXIT_REGISTRY)
        assert f"docker login {registry.host}" in said.err
        folder = tmp_path / "docker"
        folder.mkdir()
        secret = base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()
        (folder / "config.json").write_text(json.dumps({"auths": {registry.host: {"auth": secret}}}))
        said = call("push", "--json", "--registry", registry.host, "one-12.1-cu121")
        assert candidate_of(graph) in registry.find("one").tags
        for text in (PASSWORD, secret):
            assert text not in said.out + said.err
            assert all(text.encode() not in path.read_bytes() for path in files_below(tmp_path / "store"))


def files_below(folder: Path) -> Iterator[Path]:
    return (path for path in folder.rglob("*") if path.is_file())


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--push", "--no-test"), "--no-test"),
        (("--push",), "registry = "),
        (("--registry", "127.0.0.1:5"), "--push"),
        (("--push", "--registry", "https://x.org"), "'https://x.org'"),
    ],
)
def test_build_push_is_refused_before_any_work(call: Call, options: tuple[str, ...], said: str) -> None:
    done = call("build", *options, "one-12.1-cu121", code=errors.EXIT_USAGE)
    assert said in done.err
    assert (done.error_codes == ("option-conflict",)) == (said in ("--no-test", "--push"))


# --- pull ----------------------------------------------------------------------------------------


def pulled(call: Call, *arguments: str) -> Any:
    return json_of(call("pull", "--json", *arguments, store="fresh"), "pull")


def test_pull_by_reference_gives_the_same_digest(
    call: Call, registry: RegistryMadeHere, graph: ManifestGraph, tmp_path: Path
) -> None:
    push(call, registry, "one-12.1-cu121", path="")
    reference = f"{registry.host}/one:{candidate_of(graph)}"
    value = pulled(call, reference)
    assert (value["digest"], value["complete"]) == (graph.root.descriptor.digest, True)
    assert value["blobs"] == {"received": 4, "present": 0}
    assert value["name"] == f"{registry.host.replace(':', '.')}/one:{candidate_of(graph)}"
    image = Layout(tmp_path / "fresh").image(value["name"])
    assert image is not None
    assert image.digest == graph.root.descriptor.digest
    again = pulled(call, reference)
    assert (again["bytes_received"], again["blobs"]) == (0, {"received": 0, "present": 4})


def test_pull_asks_for_room_before_the_first_byte(
    call: Call, registry: RegistryMadeHere, graph: ManifestGraph, tmp_path: Path
) -> None:
    """A manifest may say what it likes of a size."""
    push(call, registry, "one-12.1-cu121", path="")
    client = RegistryClient(registry.host)
    value = json.loads(image_manifest(client, "vast", b"one"))
    value["layers"][0]["size"] = 10**13
    repository = registry.find("vast")
    data = canonical_json(value)
    repository.manifests[digest_of(data)], repository.tags["1"] = (MANIFEST_TYPE, data), digest_of(data)
    said = call("pull", f"{registry.host}/vast:1", store="fresh", code=errors.EXIT_BUILD)
    assert said.error_codes == ("disk-full",)
    assert "10000.0 GB" in said.err
    assert not list((tmp_path / "fresh/blobs/sha256").glob("*"))


def test_pull_brings_a_layer_anew_that_changed_here(
    call: Call, registry: RegistryMadeHere, graph: ManifestGraph, tmp_path: Path
) -> None:
    push(call, registry, "one-12.1-cu121", path="")
    reference = f"{registry.host}/one:{candidate_of(graph)}"
    pulled(call, reference)
    layer = max(graph.blobs, key=lambda blob: blob.size)
    path = Layout(tmp_path / "fresh").blob_path(layer.digest)
    path.write_bytes(b"x" * layer.size)
    assert pulled(call, reference)["blobs"] == {"received": 1, "present": 3}
    assert digest_of(path.read_bytes()) == layer.digest


@pytest.mark.parametrize("config", CONFIGS_THAT_ARE_NONE.values(), ids=CONFIGS_THAT_ARE_NONE)
def test_an_image_without_a_config_gets_no_name_here(
    registry: RegistryMadeHere, call: Call, config: bytes
) -> None:
    client = RegistryClient(registry.host)
    client.put_manifest("odd", odd_image(client, "odd", config), MANIFEST_TYPE, "1")
    said = call("pull", f"{registry.host}/odd:1", store="fresh", code=errors.EXIT_REGISTRY)
    assert "config of sha256:" in said.err
    assert "is malformed" in said.err
    assert json_of(call("image", "list", "--json", store="fresh"), "image-list")["images"] == []


@pytest.mark.parametrize("form", ["{target}@{digest}", "{target}:{tag}", "{target}:{tag}@{digest}"])
def test_pull_of_a_target_becomes_the_stores_image_of_it(
    call: Call, registry: RegistryMadeHere, graph: ManifestGraph, tmp_path: Path, form: str
) -> None:
    push(call, registry, "one-12.1-cu121")
    digest = graph.root.descriptor.digest
    name = form.format(target="one-12.1-cu121", digest=digest, tag=candidate_of(graph))
    value = pulled(call, "--registry", f"{registry.host}/site", name)
    assert (value["name"], value["digest"]) == ("one:12.1-cu121", digest)
    image = Layout(tmp_path / "fresh").image("one:12.1-cu121")
    assert image is not None
    assert image.digest == digest


@pytest.mark.parametrize(
    ("name", "code", "said"),
    [
        ("one-12.1-cu121", errors.EXIT_REGISTRY, "has no 12.1-cu121"),
        ("one-12.1-cu121@sha256:" + "0" * 64, errors.EXIT_REGISTRY, "has no sha256:0000"),
        ("one-12.1-cu121:", errors.EXIT_USAGE, "not an image reference"),
        ("one-12.1-cu121@sha256:12", errors.EXIT_USAGE, "not an image reference"),
        ("three-12.1-cu121", errors.EXIT_NOTHING_SELECTED, "three"),
        ("one-*", errors.EXIT_USAGE, "matches 2 targets"),
        ("plain/name:1", errors.EXIT_USAGE, "no registry host"),
    ],
)
def test_what_cannot_be_pulled_is_said(
    call: Call, registry: RegistryMadeHere, graph: ManifestGraph, name: str, code: int, said: str
) -> None:
    push(call, registry, "one-12.1-cu121")
    options = [] if "/" in name else ["--registry", f"{registry.host}/site"]
    assert said in call("pull", *options, name, store="fresh", code=code).err


def test_of_several_platforms_one_is_pulled_and_it_is_said(
    call: Call, registry: RegistryMadeHere, tmp_path: Path
) -> None:
    store = LayoutStore(Layout(tmp_path / "both"))
    with store.layout.in_use(QuietProgress()):
        put_index(store, "both", [b"shared"], ["arm64", "amd64"], "1")
    whole = read_graph(StoreRepository(store=store, repository="both"), "1")
    there = RegistryClient(registry.host)
    from imagefactory.oci.transfer import TransferRequest, send

    send(
        StoreRepository(store=store, repository="both"),
        there,
        TransferRequest(graph=whole, repository="both", tags=("1",)),
        QuietProgress(),
    )
    value = pulled(call, f"{registry.host}/both:1")
    assert not value["complete"]
    assert value["digest"] == whole.manifests[1].descriptor.digest
    assert value["blobs"]["received"] == 3
    said = call("pull", f"{registry.host}/both:1", store="again")
    assert "the linux/amd64 manifest of an index of several" in said.out


@pytest.mark.parametrize(("first", "code"), [("amd64", 0), ("arm64", errors.EXIT_REGISTRY)])
def test_an_image_that_an_index_does_not_place_is_not_taken_for_another_processor(
    call: Call, registry: RegistryMadeHere, monkeypatch: pytest.MonkeyPatch, first: str, code: int
) -> None:
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    client = RegistryClient(registry.host)
    rows = []
    for processor in (first, "arm64" if first == "amd64" else "amd64"):
        layer = put_blob(client, "both", processor.encode())
        config = {"architecture": processor, "rootfs": {"type": "layers", "diff_ids": [layer.digest]}}
        manifest = {
            "schemaVersion": 2,
            "mediaType": MANIFEST_TYPE,
            "config": format_descriptor(put_blob(client, "both", canonical_json(config), CONFIG_TYPE)),
            "layers": [{**format_descriptor(layer), "mediaType": "application/vnd.oci.image.layer.v1.tar"}],
        }
        rows.append(format_descriptor(client.put_manifest("both", canonical_json(manifest), MANIFEST_TYPE)))
    index = {"schemaVersion": 2, "mediaType": INDEX_TYPE, "manifests": rows}
    client.put_manifest("both", canonical_json(index), INDEX_TYPE, "1")
    call("pull", f"{registry.host}/both:1", store="fresh", code=code)


def test_bytes_that_are_not_what_the_digest_says_are_never_kept(
    call: Call,
    registry: RegistryMadeHere,
    graph: ManifestGraph,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("imagefactory.http.RetryPolicy.wait", lambda *_: 0.0)
    push(call, registry, "one-12.1-cu121", path="")
    layer = graph.blobs[1].digest
    registry.shelves.blobs[layer] = b"x" * len(registry.shelves.blobs[layer])
    said = call(
        "pull", f"{registry.host}/one:{candidate_of(graph)}", store="fresh", code=errors.EXIT_REGISTRY
    )
    assert "digest" in said.err
    assert Layout(tmp_path / "fresh").tags() == {}


# --- copy ----------------------------------------------------------------------------------------


def test_copy_within_a_registry_sends_nothing(
    call: Call, registry: RegistryMadeHere, graph: ManifestGraph
) -> None:
    push(call, registry, "one-12.1-cu121", path="")
    source = f"{registry.host}/one:{candidate_of(graph)}"
    said = call("image", "copy", "--json", source, f"{registry.host}/elsewhere/one:kept")
    value = json_of(said, "image-copy")
    assert value["digest"] == graph.root.descriptor.digest
    assert (value["bytes_sent"], value["blobs"]["mounted"]) == (0, 4)
    assert registry.find("elsewhere/one").tags == {"kept": graph.root.descriptor.digest}


def test_copy_to_another_registry_brings_all_and_referrers_on_demand(
    call: Call, registry: RegistryMadeHere, graph: ManifestGraph
) -> None:
    push(call, registry, "one-12.1-cu121", path="")
    source = f"{registry.host}/one@{graph.root.descriptor.digest}"
    digest = graph.root.descriptor.digest
    with registry_made_here(Ways(referrers=False)) as other:
        call("image", "copy", source, f"{other.host}/one:kept")
        assert other.find("one").tags == {"kept": digest}
        assert RegistryClient(other.host).referrers("one", digest) == ()
        said = call("image", "copy", "--referrers", source, f"{other.host}/one:kept")
        assert digest in said.out
        (record,) = RegistryClient(other.host).referrers("one", digest)
        assert RegistryClient(other.host).referrers("one", digest, PUSHED_TYPE) == (record,)


@pytest.mark.parametrize("within", [True, False])
def test_a_dry_run_of_copy_predicts_a_real_one(
    call: Call, registry: RegistryMadeHere, tmp_path: Path, graph: ManifestGraph, within: bool
) -> None:
    stored_image(tmp_path / "store", "two", [b"other"])
    first, second = push(call, registry, "one-12.1-cu121", "two-12.1-cu121", path="")
    with registry_made_here() as other:
        place = registry if within else other
        words = ("image", "copy", "--json", "--referrers")
        for source in (first, second):
            copying = (*words, source["reference"], f"{place.host}/elsewhere/one:kept")
            before = deepcopy(place.shelves)
            plan = json_of(call(*copying, "--dry-run"), "image-copy")
            assert place.shelves == before
            real = json_of(call(*copying), "image-copy")
            assert (plan.pop("dry_run"), real.pop("dry_run")) == (True, False)
            assert plan | {"seconds": 0} == real | {"seconds": 0}
        assert (real["before"], real["digest"]) == (first["digest"], second["digest"])
        candidate = (*words, second["reference"], f"{place.host}/elsewhere/one:{second['tag']}")
        plan, real = (json_of(call(*candidate, *more), "image-copy") for more in (("--dry-run",), ()))
        assert (plan["bytes_sent"], plan["blobs"]) == (real["bytes_sent"], real["blobs"])
        conflict = (*words, first["reference"], f"{registry.host}/two:{second['tag']}")
        for more in ((), ("--dry-run",)):
            said = call(*conflict, *more, code=errors.EXIT_REGISTRY)
            assert said.error_codes == ("candidate-conflict",)


@pytest.mark.parametrize(
    ("destination", "code"), [("{host}/x@sha256:" + "0" * 64, errors.EXIT_USAGE), ("x:1", errors.EXIT_USAGE)]
)
def test_copy_needs_a_place_with_a_tag(
    call: Call, registry: RegistryMadeHere, graph: ManifestGraph, destination: str, code: int
) -> None:
    call("image", "copy", f"{registry.host}/one:1", destination.format(host=registry.host), code=code)


def test_copy_overwrites_no_candidate(
    call: Call, registry: RegistryMadeHere, tmp_path: Path, graph: ManifestGraph
) -> None:
    stored_image(tmp_path / "store", "two", [b"other"])
    first, second = push(call, registry, "one-12.1-cu121", "two-12.1-cu121", path="")
    said = call(
        "image",
        "copy",
        second["reference"],
        f"{registry.host}/one:{first['tag']}",
        code=errors.EXIT_REGISTRY,
    )
    assert "a candidate never changes" in said.err
    assert registry.find("one").tags == {first["tag"]: first["digest"]}


# --- image list --registry, image prune --registry -----------------------------------------------


def test_list_shows_candidates_and_tags(call: Call, registry: RegistryMadeHere, graph: ManifestGraph) -> None:
    push(call, registry, "one-12.1-cu121", "--tag", "nightly")
    said = call("image", "list", "--registry", f"{registry.host}/site")
    rows = [re.split(r"  +", line) for line in said.out.splitlines()]
    digest = graph.root.descriptor.digest
    assert rows[1][:2] + rows[1][3:] == [f"site/one:{candidate_of(graph)}", "candidate", digest]
    assert rows[2][:2] == ["site/one:nightly", "other"]
    assert said.out.splitlines()[-1] == f"nothing in {registry.host}/site/two"
    value = json_of(
        call("image", "list", "--json", "--registry", f"{registry.host}/site", "one-*"), "registry-list"
    )
    ((one),) = value["repositories"]
    assert [tag["type"] for tag in one["tags"]] == ["candidate", "other"]
    assert one["tags"][0]["size"] == graph.size


def prune(call: Call, registry: RegistryMadeHere, *arguments: str) -> dict[str, tuple[bool, str]]:
    said = call("image", "prune", "--json", "--registry", registry.host, "--older-than", "0h", *arguments)
    rows = [row for place in json_of(said, "registry-prune")["repositories"] for row in place["candidates"]]
    return {row["tag"]: (row["removed"], row["reason"]) for row in rows}


@pytest.mark.parametrize("referrers", [True, False])
def test_prune_removes_old_candidates_and_their_records(
    call: Call, graph: ManifestGraph, referrers: bool
) -> None:
    with registry_made_here(Ways(referrers=referrers, untag=False)) as registry:
        push(call, registry, "one-12.1-cu121", path="")
        tag = candidate_of(graph)
        assert prune(call, registry, "--dry-run")[tag][0]
        assert tag in registry.find("one").tags
        said = call("image", "prune", "--older-than", "30d", "--registry", registry.host)
        assert f"kept one:{tag} (pushed " in said.out
        assert prune(call, registry)[tag][0]
        assert registry.find("one").tags == {}
        assert registry.find("one").manifests == {}
        assert (
            "no candidates" in call("image", "prune", "--older-than", "0h", "--registry", registry.host).out
        )


def test_an_invalid_recipe_keeps_its_candidates_and_stops_no_other(
    call: Call, registry: RegistryMadeHere, graph: ManifestGraph, tmp_path: Path
) -> None:
    push(call, registry, "one-12.1-cu121", path="")
    assert candidate_of(graph) in registry.find("one").tags
    recipe = next(tmp_path.rglob("recipes")) / "two.yaml"
    text = recipe.read_text()
    recipe.write_text("family: two\n")
    for command in (("list",), ("prune", "--older-than", "0h")):
        words = ("image", *command, "--json", "--registry", registry.host)
        said = call(*words, code=errors.EXIT_USAGE)
        assert set(said.error_codes) == {"recipe-invalid"}
        repositories = [row["repository"] for row in json.loads(said.out)["repositories"]]
        assert repositories == ["one"]
    assert registry.find("one").tags == {}
    recipe.write_text(text)
    assert call("image", "list", "--registry", registry.host).code == 0


@pytest.mark.parametrize("kept_by", ["tag", "no record"])
def test_prune_keeps_what_is_needed_and_says_why(
    call: Call, registry: RegistryMadeHere, graph: ManifestGraph, kept_by: str
) -> None:
    push(call, registry, "one-12.1-cu121", path="")
    there, digest = registry.find("one"), graph.root.descriptor.digest
    if kept_by == "tag":
        there.tags["12.1-cu121"] = digest
    else:
        records = [d for d, (_, data) in there.manifests.items() if PUSHED_TYPE.encode() in data]
        for record in records:
            del there.manifests[record]
    before = dict(there.tags)
    removed, why = prune(call, registry)[candidate_of(graph)]
    assert not removed
    assert {"tag": "12.1-cu121 points to it", "no record": "is unknown"}[kept_by] in why
    assert there.tags == before


def test_one_broken_tag_hides_no_other_and_is_pruned(
    call: Call, registry: RegistryMadeHere, graph: ManifestGraph, tmp_path: Path
) -> None:
    push(call, registry, "one-12.1-cu121", path="")
    stored_image(tmp_path / "store", "one", [b"newer"])
    (newer,) = push(call, registry, "one-12.1-cu121", "--tag", "nightly", path="")
    there, broken = registry.find("one"), candidate_of(graph)
    del there.manifests[graph.manifests[0].descriptor.digest]
    said = call("image", "list", "--json", "--registry", registry.host, "one-*")
    ((one),) = json_of(said, "registry-list")["repositories"]
    assert {tag["tag"]: (tag["type"], tag["size"] > 0) for tag in one["tags"]} == {
        broken: ("candidate", False),
        newer["tag"]: ("candidate", True),
        "nightly": ("other", True),
    }
    fates = prune(call, registry)
    assert (fates[broken][0], fates[newer["tag"]][0]) == (True, False)
    assert set(there.tags) == {newer["tag"], "nightly"}


# --- the store: .sif files beside images ---------------------------------------------------------


def stored_sif(path: Path, subject: Descriptor, data: bytes, tag: str = "") -> SifArtifact:
    """A .sif as a conversion would have left it: kept by its image, without a tag."""
    layout = Layout(path)
    (path / "made.sif").write_bytes(data)
    with layout.in_use(QuietProgress()):
        origin = SifOrigin(target="one-12.1-cu121", compression="fast", subject=subject)
        return store_sif(layout, path / "made.sif", origin, tag=tag)


def listed(call: Call, code: int = 0) -> Any:
    return json_of(call("image", "list", "--json", code=code), "image-list")


def test_a_sif_kept_by_its_image_is_removed_by_the_name_that_list_shows(
    call: Call, graph: ManifestGraph, tmp_path: Path
) -> None:
    subject = graph.manifests[0].descriptor
    one, two = (stored_sif(tmp_path / "store", subject, data) for data in (b"one", b"two"))
    assert {row["name"] for row in listed(call)["sifs"]} == {one.name, two.name}
    said = call("image", "remove", one.name, "one:12.1-cu12", code=errors.EXIT_NOTHING_SELECTED)
    assert said.error_codes == ("image-not-found",)
    assert "one:12.1-cu121?" in said.err
    said = call("image", "remove", one.name[:-5] + ".sif", code=errors.EXIT_NOTHING_SELECTED)
    assert f"{one.name}?" in said.err
    assert len(listed(call)["sifs"]) == 2  # nothing goes where one name is unknown
    assert call("image", "remove", one.name).out == f"removed {one.name}\n"
    assert [row["name"] for row in listed(call)["sifs"]] == [two.name]
    call("image", "prune")
    assert (one.path.exists(), two.path.exists()) == (False, True)
    assert [row["name"] for row in listed(call)["images"]] == ["one:12.1-cu121"]


def test_every_tag_of_a_sif_is_shown(call: Call, graph: ManifestGraph, tmp_path: Path) -> None:
    subject = graph.manifests[0].descriptor
    names = {"one:a.sif", "one:b.sif"}
    for name in sorted(names):
        sif = stored_sif(tmp_path / "store", subject, b"the same", name)
    value = listed(call)
    assert {row["name"] for row in value["sifs"]} == names | {sif.name}
    assert {row["digest"] for row in value["sifs"]} == {sif.digest}
    said = call("image", "list").out.split()
    assert names | {sif.name} <= set(said)
    call("image", "remove", *names, sif.name)
    assert listed(call)["sifs"] == []


def test_a_damaged_sif_is_told_and_hides_nothing(call: Call, graph: ManifestGraph, tmp_path: Path) -> None:
    subject = graph.manifests[0].descriptor
    lost, whole, other = (
        stored_sif(tmp_path / "store", subject, data) for data in (b"one", b"two", b"three")
    )
    lost.path.unlink()
    other.path.write_bytes(b"thre")
    said = call("image", "list")
    assert f"error: {lost.name}: the file of {lost.digest} is missing" in said.err
    assert whole.name in said.out.split()
    value = listed(call)
    assert [row["name"] for row in value["sifs"]] == [whole.name]
    assert {(row["target"], row["exit_code"]) for row in value["errors"]} == {
        (lost.name, errors.EXIT_BUILD),
        (other.name, errors.EXIT_BUILD),
    }
    call("image", "remove", other.name)
    call("image", "prune")
    value = listed(call)
    assert ([row["name"] for row in value["sifs"]], value["errors"]) == ([whole.name], [])


def test_a_damaged_image_is_a_failure_and_the_others_are_listed(
    call: Call, graph: ManifestGraph, tmp_path: Path
) -> None:
    stored_image(tmp_path / "store", "two", [b"whole"])
    Layout(tmp_path / "store").blob_path(graph.blobs[1].digest).unlink()
    value = listed(call, code=errors.EXIT_BUILD)
    assert [row["name"] for row in value["images"]] == ["two:12.1-cu121"]
    assert [row["target"] for row in value["errors"]] == ["one:12.1-cu121"]
    said = call("image", "list", code=errors.EXIT_BUILD)
    assert "two:12.1-cu121" in said.out.split()


def test_an_index_without_platforms_is_listed_and_hurts_nothing(
    call: Call, graph: ManifestGraph, tmp_path: Path
) -> None:
    layout = Layout(tmp_path / "store")
    rows = [format_descriptor(one.descriptor) for one in (graph.manifests[0], graph.manifests[0])]
    index = {"schemaVersion": 2, "mediaType": INDEX_TYPE, "manifests": rows}
    layout.tag("other:1", layout.add(canonical_json(index), INDEX_TYPE))
    value = listed(call)
    assert [row["name"] for row in value["images"]] == ["one:12.1-cu121"]
    assert [row["target"] for row in value["errors"]] == ["other:1"]
    assert "other:1" in call("image", "list").out.split()
    call("image", "remove", "other:1")
    assert listed(call)["errors"] == []


def test_ages() -> None:
    assert (parse_age("30d"), parse_age("12h"), parse_age("2w")) == (
        timedelta(days=30),
        timedelta(hours=12),
        timedelta(days=14),
    )
    for text in ("30", "d", "-1d", "1m", "1.5d", "1d\n"):
        with pytest.raises(UsageError) as caught:
            parse_age(text)
        assert caught.value.code == "option-invalid"
