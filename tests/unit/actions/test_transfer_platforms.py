"""One index of a target's images for several platforms: what a push joins, and what a tag waits for."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import timedelta

import pytest

from imagefactory.actions.images import PromotionRequest
from imagefactory.actions.promote import promote
from imagefactory.actions.transfer import (
    PushOptions,
    PushResult,
    on_other_platforms,
    plain_name,
    pull_image,
    push_target,
)
from imagefactory.gpu.capability import architecture
from imagefactory.model import Target
from imagefactory.oci.graph import StoreRepository
from imagefactory.oci.layout import reference
from imagefactory.oci.registry.client import RegistryClient
from imagefactory.oci.store import parse_reference
from imagefactory.progress import QUIET
from imagefactory.project import Project
from tests.made.layout import add_image
from tests.made.registry import RegistryMadeHere
from tests.made.verdicts import NOW

PLAIN, ARM = "2.3-cu121", "2.3-cu121-arm64"


@pytest.fixture
def both(factory: Project, target: Target) -> tuple[Project, Target, Target]:
    """A target of CPUs, whose tags no verdict moves, for amd64 and for arm64."""
    amd = replace(target, capabilities=())
    arm = replace(amd, name=f"{amd.name}-arm64", platform="linux/arm64")
    return replace(factory, targets=(amd, arm)), amd, arm


def push(factory: Project, target: Target, registry: RegistryMadeHere, minute: int, *tags: str) -> PushResult:
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
    assert push(factory, amd, registry, 0, "nightly").joined is None
    second = put(factory, arm, b"arm")
    pushed = push(factory, arm, registry, 1, "nightly")
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
    again = push(factory, amd, registry, 2).joined
    assert again is not None
    assert again.reference == joined.reference


def test_a_pull_brings_the_platform_that_was_asked_for(
    both: tuple[Project, Target, Target], registry: RegistryMadeHere
) -> None:
    factory, amd, arm = both
    put(factory, amd, b"amd")
    put(factory, arm, b"arm")
    push(factory, arm, registry, 0, "nightly")
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
    push(factory, amd, registry, 0)
    joined = push(factory, arm, registry, 1).joined
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
