"""From a build to a registry and back, on the command line, before a real registry."""

from __future__ import annotations

import hashlib
import json
import subprocess
from dataclasses import replace
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest

from tests.services.children import stdout_of
from tests.services.factory import Factory, copy_store

TARGET = "tiny-12.1-cu121"


@pytest.fixture(scope="module")
def tiny(tiny_root: Path, small_store: Path, small_factory: Factory, scratch: Path, registry: str) -> Factory:
    """The tiny target's factory, with the registry in its settings."""
    return Factory(
        store=copy_store(small_store, scratch / "push-pull-store"),
        cache=small_factory.cache,
        root=tiny_root,
        extra={"IMAGEFACTORY_REGISTRY": f"{registry}/push-pull"},
    )


@pytest.fixture(scope="module")
def built(tiny: Factory) -> dict[str, Any]:
    """What the build gave, and under `pushed` what its first push gave."""
    return {**tiny.build(TARGET, "--no-test"), "pushed": push(tiny)}


def push(factory: Factory, *options: str) -> dict[str, Any]:
    value = json.loads(factory.run("push", "--json", *options, TARGET).stdout)
    assert value["errors"] == []
    (row,) = value["results"]
    assert isinstance(row, dict)
    return row


def inspected(reference: str) -> dict[str, Any]:
    command = ["skopeo", "inspect", "--tls-verify=false", f"docker://{reference}"]
    output = stdout_of(command, timeout=120)
    value = json.loads(output)
    assert isinstance(value, dict)
    return value


def raw_digest(reference: str) -> str:
    """The digest of what the tag itself names, by another client."""
    command = ["skopeo", "inspect", "--raw", "--tls-verify=false", f"docker://{reference}"]
    done = subprocess.run(command, capture_output=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return f"sha256:{hashlib.sha256(done.stdout).hexdigest()}"


def test_push_says_the_digest_that_others_see(built: dict[str, Any], registry: str) -> None:
    pushed = built["pushed"]
    assert pushed["digest"] == built["image"]["digest"]
    assert pushed["manifest"] == built["image"]["manifest"]
    assert pushed["tag"] == f"12.1-cu121-{pushed['digest'][7:19]}"
    where = f"{registry}/push-pull/tiny:{pushed['tag']}"
    assert pushed["reference"] == f"{where}@{pushed['digest']}"
    assert raw_digest(where) == pushed["digest"]
    seen = inspected(where)
    assert seen["Architecture"] == "amd64"
    assert seen["Layers"] == [layer["digest"] for layer in built["image"]["layers"]]
    assert pushed["bytes_sent"] <= 1.05 * built["image"]["size"]
    assert "12.1-cu121" not in seen["RepoTags"]


def test_build_push_sends_nothing_untried(tiny: Factory, built: dict[str, Any]) -> None:
    assert "--no-test" in tiny.run("build", "--push", "--no-test", TARGET, code=2).stderr


def test_push_again_sends_nothing_and_sets_a_further_tag(
    tiny: Factory, built: dict[str, Any], registry: str
) -> None:
    again = push(tiny, "--tag", "nightly")
    assert (again["bytes_sent"], again["blobs"]["sent"], again["blobs"]["mounted"]) == (0, 0, 0)
    assert again["digest"] == built["pushed"]["digest"]
    assert raw_digest(f"{registry}/push-pull/tiny:nightly") == again["digest"]
    assert "only promotion" in tiny.run("push", "--tag", "12.1-cu121", TARGET, code=2).stderr


def test_pull_into_an_empty_store_gives_the_same_image_and_it_runs(
    tiny: Factory, built: dict[str, Any], scratch: Path
) -> None:
    digest = built["pushed"]["digest"]
    fresh = replace(tiny, store=scratch / "pulled-store")
    value = json.loads(fresh.run("pull", "--json", f"{TARGET}@{digest}").stdout)
    assert (value["digest"], value["complete"], value["name"]) == (digest, True, "tiny:12.1-cu121")
    assert value["bytes_received"] >= built["image"]["size"]
    ran = fresh.run("run", TARGET, "--", "python", "-c", "import idna; print(idna.__version__)")
    assert ran.stdout == "3.7\n"
    again = json.loads(fresh.run("pull", "--json", built["pushed"]["reference"]).stdout)
    assert (again["bytes_received"], again["name"]) == (0, f"tiny:{built['pushed']['tag']}")


def test_pushed_packages_build_the_same_image_when_all_servers_are_gone(
    tiny: Factory, tiny_root: Path, built: dict[str, Any], registry: str, scratch: Path
) -> None:
    """With only the key that signed the packages, and only after it is trusted."""
    home = scratch / "sources-home"
    root = copytree(tiny_root, scratch / "sources-root")
    place = f"{registry}/archive"
    own = {"XDG_CONFIG_HOME": str(home), "IMAGEFACTORY_REGISTRY": place}
    maker = replace(tiny, root=root, extra=own)
    maker.run("key", "create", "archivist")
    unsigned = push(replace(maker, extra={**own, "XDG_CONFIG_HOME": f"{home}-none"}), "--with-sources")
    assert unsigned["sources"]["signed_by"] is None
    pushed = push(maker, "--with-sources")
    sources = pushed["sources"]
    assert (sources["signed_by"], sources["blobs"]["sent"]) == ("archivist", 1)  # the signature
    assert sources["digest"] == raw_digest(sources["reference"].split("@")[0])
    dead = {
        **own,
        "IMAGEFACTORY_DEBIAN_MIRROR": "http://127.0.0.1:1/debian",
        "IMAGEFACTORY_DEBIAN_SNAPSHOT": "none",
        "IMAGEFACTORY_INDEX": "http://127.0.0.1:1/simple",
    }
    later = Factory(store=scratch / "later-store", cache=scratch / "later-cache", root=root, extra=dead)
    refused = later.run("build", "--strict-base", "--no-test", "--json", TARGET, code=5)
    (error,) = json.loads(refused.stdout)["errors"]
    assert error["code"] == "archive-read-failed"  # no key is trusted yet
    assert not [*later.cache.glob("debs/*/*/signed")]
    maker.run("key", "trust", "archivist")
    again = later.build(TARGET, "--strict-base", "--no-test")
    assert again["image"]["digest"] == built["image"]["digest"] == pushed["digest"]


def test_copy_within_the_registry_mounts(built: dict[str, Any], tiny: Factory, registry: str) -> None:
    pushed = built["pushed"]
    destination = f"{registry}/push-pull/kept/tiny:keep"
    value = json.loads(tiny.run("image", "copy", "--json", pushed["reference"], destination).stdout)
    assert value["bytes_sent"] == 0
    assert value["blobs"]["mounted"] == len(built["image"]["layers"]) + 1
    assert raw_digest(destination) == value["digest"] == pushed["digest"]


def test_list_and_prune_in_a_real_registry(built: dict[str, Any], tiny: Factory, registry: str) -> None:
    """docker-registry 2.8 has no referrers API and removes no tag by name: both are met here."""
    place = f"{registry}/prune"
    pushed = push(tiny, "--registry", place, "--tag", "keep")
    tag = pushed["tag"]
    listed = json.loads(tiny.run("image", "list", "--json", "--registry", place).stdout)
    ((repository),) = listed["repositories"]
    assert {row["tag"]: row["type"] for row in repository["tags"]} == {tag: "candidate", "keep": "other"}

    def prune(age: str) -> dict[str, Any]:
        done = tiny.run("image", "prune", "--json", "--older-than", age, "--registry", place)
        (row,) = json.loads(done.stdout)["repositories"][0]["candidates"]
        assert isinstance(row, dict)
        return row

    assert not prune("30d")["removed"]
    kept = prune("0h")
    assert (kept["removed"], kept["reason"]) == (False, "keep points to it")
    other = f"{registry}/prune/other"
    assert push(tiny, "--registry", other)["tag"] == tag
    gone = json.loads(tiny.run("image", "prune", "--json", "--older-than", "0h", "--registry", other).stdout)
    assert [row["removed"] for row in gone["repositories"][0]["candidates"]] == [True]
    left = json.loads(tiny.run("image", "list", "--json", "--registry", other).stdout)
    assert left["repositories"][0]["tags"] == []
    # Pushed again, it is there again: the blobs were not yet collected.
    back = push(tiny, "--registry", other)
    assert (back["bytes_sent"] < 10_000, back["digest"]) == (True, pushed["digest"])


@pytest.fixture(scope="module")
def deep(tiny: Factory, tiny_root: Path, built: dict[str, Any], scratch: Path) -> Factory:
    """The same factory with a layer lock beside its lock."""
    factory = replace(tiny, root=copytree(tiny_root, scratch / "deep-root"))
    factory.run("lock", "--layers", TARGET)
    assert built["image"]["digest"] in factory.run("show", "--json", TARGET).stdout
    return factory


def test_a_machine_that_made_nothing_pushes_what_the_registry_has(
    deep: Factory, built: dict[str, Any], scratch: Path, registry: str
) -> None:
    place, digest = f"{registry}/by-layer-lock", built["image"]["digest"]
    fresh = replace(deep, store=scratch / "nothing-made", cache=scratch / "nothing-fetched")
    lacking = fresh.run("push", "--registry", place, TARGET, code=7).stderr
    assert "lacks layers of it: debian-12, environment" in lacking
    push(deep, "--registry", place)
    deep.run("image", "prune", "--older-than", "0h", "--registry", place)
    pushed = push(fresh, "--registry", place)
    assert (pushed["digest"], pushed["manifest"]) == (digest, built["image"]["manifest"])
    assert pushed["blobs"] == {"sent": 0, "mounted": 0, "present": len(built["image"]["layers"]) + 1}
    assert raw_digest(f"{place}/tiny:{pushed['tag']}") == digest
    assert sum(path.stat().st_size for path in fresh.store.rglob("*") if path.is_file()) < 100_000
    fresh.run("pull", "--registry", place, f"{TARGET}@{digest}")
    assert (
        fresh.run("run", TARGET, "--", "python", "-c", "import idna; print(idna.__version__)").stdout
        == "3.7\n"
    )


def test_a_wrong_entry_of_a_layer_lock_is_named_by_a_build_and_by_making_all_anew(deep: Factory) -> None:
    """Of all layers, made anew, that one is told alone: the others are what the file says."""
    path = deep.root / "lockfiles" / f"{TARGET}.layers.txt"
    text = path.read_text()
    line = text.splitlines()[-1]
    diff_id = line.split()[1]
    path.write_text(text.replace(diff_id, f"sha256:{'0' * 64}"))
    told = f"{path}:{text.count(chr(10))}: '{line.split(' ', 3)[3]}' has the diff id {diff_id}"
    assert told in deep.run("build", "--no-test", TARGET, code=5).stderr
    said = deep.run("lock", "--check", "--layers", TARGET, code=5).stderr
    assert told in said
    assert said.count(".layers.txt:") == 1
    path.write_text(text)
