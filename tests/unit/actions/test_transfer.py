"""A push of what this store pushed before: what is asked, and what a registry that lost it gets again."""

from __future__ import annotations

import json
import subprocess
from dataclasses import replace
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest

from imagefactory.actions import transfer as pushing
from imagefactory.actions.definition import define_target
from imagefactory.actions.promote import PromotionRequest, promote
from imagefactory.actions.transfer import (
    PushOptions,
    PushResult,
    on_other_platforms,
    plain_name,
    pull_image,
    push_target,
)
from imagefactory.gpu.capability import architecture
from imagefactory.model import CheckResult, CheckState, Outcome, Report, Target
from imagefactory.oci.candidates import PUSHED_TYPE
from imagefactory.oci.graph import StoreRepository
from imagefactory.oci.layout import reference
from imagefactory.oci.manifests import Image
from imagefactory.oci.registry.client import RegistryClient
from imagefactory.oci.store import parse_reference
from imagefactory.progress import QUIET
from imagefactory.project import Project
from imagefactory.verify import smoke
from imagefactory.verify.report import SmokeTest
from imagefactory.verify.smoke import write_record
from imagefactory.verify.suite_files import required_checks, suite_digest
from tests.made.command import run
from tests.made.layout import add_image
from tests.made.pushed import push, with_nonce_key
from tests.made.registry import RegistryMadeHere
from tests.made.verdicts import NOW

REPOSITORY = "pytorch"


def image_of(factory: Project, target: Target) -> Image:
    image = factory.layout.image(reference(target))
    assert image is not None
    return image


def keep_pass(factory: Project, target: Target, image: Image) -> None:
    """The record of a smoke test that this image passed under unshare."""
    definition = define_target(factory, target)
    trial = SmokeTest(image=image, definition=definition, nonce="5eed", runner="unshare")
    passed = CheckState.PASSED
    report = Report(
        target=target.name,
        image=image.digest,
        config=image.config,
        suite=suite_digest(),
        passed=True,
        failure=None,
        gpu=Outcome.NOT_TESTED,
        checks=tuple(
            CheckResult(name=name, state=passed, detail="", seconds=0.0, numbers=())
            for name in required_checks(definition)
        ),
        from_record=False,
    )
    write_record(smoke._record_of(trial, factory.layout.path / "checks", suite_digest()), report)


def test_an_unchanged_build_and_push_is_one_process_and_one_round_trip(
    factory: Project,
    target: Target,
    pushed: str,
    registry: RegistryMadeHere,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The candidate and the manifest below it are asked for at once (tests/unit/oci/test_transfer.py)."""
    image = image_of(factory, target)
    keep_pass(factory, target, image)
    for name, value in factory.environ.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(subprocess, "Popen", None)
    registry.log.clear()
    root = str(factory.settings.root_path)
    assert run("-C", root, "build", "--push", "--registry", registry.host, target.name, "-q") == 0
    asked = sorted(f"{one} {one.path.rpartition('/')[2]}" for one in registry.log)
    assert asked == sorted(
        (f"GET manifest {image.manifest}", f"GET manifest 2.3-cu121-{pushed.removeprefix('sha256:')[:12]}")
    )
    registry.log.clear()
    assert run("-C", root, "push", "--registry", registry.host, target.name, "-q") == 0
    assert [str(one) for one in registry.log] == ["GET manifest"] * 2


def test_a_registry_that_was_emptied_gets_all_again(
    factory: Project, target: Target, pushed: str, registry: RegistryMadeHere
) -> None:
    before = registry.find(REPOSITORY)
    registry.shelves.repositories, registry.shelves.blobs = {}, {}
    assert push(factory, target, registry) == pushed
    there = registry.find(REPOSITORY)
    assert (there.tags, there.manifests) == (before.tags, before.manifests)
    assert there.blobs == before.blobs


def test_a_manifest_that_a_collection_took_from_below_an_index_comes_again(
    factory: Project, target: Target, pushed: str, registry: RegistryMadeHere
) -> None:
    """Registries that collect what has no tag take it with the blobs it names."""
    there, manifest = registry.find(REPOSITORY), image_of(factory, target).manifest
    whole = (dict(there.manifests), set(there.blobs))
    del there.manifests[manifest]
    there.blobs.clear()
    assert push(factory, target, registry) == pushed
    assert (there.manifests, there.blobs) == whole


def test_another_registry_at_the_same_place_is_found_out_by_its_candidate(
    factory: Project, target: Target, pushed: str, registry: RegistryMadeHere
) -> None:
    there = registry.find(REPOSITORY)
    there.tags.clear()
    assert push(factory, target, registry) == pushed
    assert list(there.tags.values()) == [pushed]


def test_what_one_path_of_a_registry_has_another_gets(
    factory: Project, target: Target, pushed: str, registry: RegistryMadeHere
) -> None:
    options = PushOptions(now=NOW, registry=f"{registry.host}/site")
    assert push_target(with_nonce_key(factory), target, options, QUIET).reference.digest == pushed
    assert registry.find(f"site/{REPOSITORY}").manifests == registry.find(REPOSITORY).manifests


def test_what_it_is_made_of_is_told_once_more_where_that_changed(
    factory: Project,
    target: Target,
    pushed: str,
    registry: RegistryMadeHere,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An image may stay the same where its definition is written in another way, by which a plan finds it."""

    def records() -> int:
        rows = registry.find(REPOSITORY).manifests.values()
        return sum(PUSHED_TYPE.encode() in data for _, data in rows)

    assert (push(factory, target, registry), records()) == (pushed, 1)
    monkeypatch.setattr(pushing, "inputs_digest", lambda *_: f"sha256:{'5' * 64}")
    assert (push(factory, target, registry), records()) == (pushed, 2)
    registry.log.clear()
    assert push(factory, target, registry) == pushed
    assert [str(one) for one in registry.log] == ["GET manifest"] * 2


@pytest.mark.parametrize(("passed", "push"), [(True, True), (False, True), (True, False)])
def test_only_what_passed_is_pushed(monkeypatch: pytest.MonkeyPatch, passed: bool, push: bool) -> None:
    events: list[Any] = []
    built = SimpleNamespace(passed=passed, image="an image")
    monkeypatch.setattr(pushing, "check_build", lambda options: events.append("checked"))
    monkeypatch.setattr(pushing, "define_target", lambda factory, target: events.append("defined"))
    monkeypatch.setattr(pushing, "build_image", lambda *arguments: built)
    monkeypatch.setattr(pushing, "push_target", lambda _, target, options, progress: events.append(options))
    options = PushOptions(registry="box.example/images", now=NOW) if push else None
    pushing.make_image(None, None, None, options, events.append, QUIET)  # type: ignore[arg-type]
    assert events[:3] == ["checked", "defined", built]
    pushes = [(row.registry, row.made) for row in events[3:]]
    assert pushes == ([("box.example/images", "an image")] if passed and push else [])


# --- One index of a target's images for several platforms: what a push joins, and what a tag waits for


PLAIN, ARM = "2.3-cu121", "2.3-cu121-arm64"


@pytest.fixture
def both(factory: Project, target: Target) -> tuple[Project, Target, Target]:
    """A target of CPUs, whose tags no verdict moves, for amd64 and for arm64."""
    amd = replace(target, capabilities=())
    arm = replace(amd, name=f"{amd.name}-arm64", platform="linux/arm64")
    return replace(factory, targets=(amd, arm)), amd, arm


def push_at(
    factory: Project, target: Target, registry: RegistryMadeHere, minute: int, *tags: str
) -> PushResult:
    options = PushOptions(now=NOW + timedelta(minutes=minute), registry=registry.host, tags=tags)
    return push_target(factory, target, options, QUIET)


def put(factory: Project, target: Target, layer: bytes) -> str:
    return add_image(
        factory.layout, reference(target), [layer], architecture=architecture(target.platform)
    ).digest


def test_targets_that_differ_by_platform_alone_are_one(
    both: tuple[Project, Target, Target],
) -> None:
    _, amd, arm = both
    other = replace(amd, name="pytorch-2.5-cu124")
    assert on_other_platforms((arm, other, amd), arm) == (amd, arm)
    assert on_other_platforms((arm, other, amd), other) == (other,)
    assert (plain_name(arm), plain_name(amd)) == (amd.name, amd.name)
    # A family for arm64 names it nowhere.
    assert plain_name(replace(amd, platform="linux/arm64")) == amd.name


def test_a_push_joins_what_the_store_has_for_both(
    both: tuple[Project, Target, Target], registry: RegistryMadeHere
) -> None:
    factory, amd, arm = both
    first = put(factory, amd, b"amd")
    assert push_at(factory, amd, registry, 0, "nightly").joined is None
    second = put(factory, arm, b"arm")
    pushed = push_at(factory, arm, registry, 1, "nightly")
    joined = pushed.joined
    assert joined is not None
    assert pushed.reference.digest == second
    assert joined.platforms == ("linux/amd64", "linux/arm64")
    assert joined.reference.tag == f"{PLAIN}-{joined.reference.digest[7:19]}"
    there = registry.find("pytorch")
    assert there.tags["nightly"] == joined.reference.digest
    assert there.tags[f"{PLAIN}-{first[7:19]}"] == first
    index = json.loads(there.manifests[joined.reference.digest][1])
    told = {one["platform"]["architecture"]: one["digest"] for one in index["manifests"]}
    alone = [json.loads(there.manifests[one][1])["manifests"][0]["digest"] for one in (first, second)]
    assert told == dict(zip(("amd64", "arm64"), alone, strict=True))
    again = push_at(factory, amd, registry, 2).joined
    assert again is not None
    assert again.reference == joined.reference


def test_a_pull_brings_the_platform_that_was_asked_for(
    both: tuple[Project, Target, Target], registry: RegistryMadeHere
) -> None:
    factory, amd, arm = both
    put(factory, amd, b"amd")
    put(factory, arm, b"arm")
    push_at(factory, arm, registry, 0, "nightly")
    where = parse_reference(f"{registry.host}/pytorch:nightly")
    for wanted, processor in (("linux/arm64", "arm64"), ("linux/amd64", "amd64")):
        pulled = pull_image(factory, where, f"got:{processor}", QUIET, platform=wanted)
        image = factory.layout.image(f"got:{processor}")
        assert image is not None
        assert (pulled.alone, pulled.whole, image.architecture) == (wanted, False, processor)


def test_the_tag_for_both_waits_for_the_tag_of_the_other(
    both: tuple[Project, Target, Target], registry: RegistryMadeHere
) -> None:
    factory, amd, arm = both
    first, second = put(factory, amd, b"amd"), put(factory, arm, b"arm")
    push_at(factory, amd, registry, 0)
    joined = push_at(factory, arm, registry, 1).joined
    assert joined is not None
    place = StoreRepository(store=RegistryClient(registry.host), repository="pytorch")

    def tags(target: Target) -> dict[str, str]:
        promote(factory, PromotionRequest(target=target, place=place, now=NOW), QUIET)
        return {
            name: digest for name, digest in registry.find("pytorch").tags.items() if name in (PLAIN, ARM)
        }

    assert tags(amd) == {PLAIN: first}
    assert tags(arm) == {PLAIN: first, ARM: second}
    assert tags(amd) == {PLAIN: joined.reference.digest, ARM: second}
