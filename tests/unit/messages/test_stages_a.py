"""The exact words of the most important errors of the stages, and of what to do then."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from imagefactory.actions.build import BuildOptions, check_build
from imagefactory.actions.centers import JoinedCenter, split_name
from imagefactory.actions.inspect import inspect_place
from imagefactory.actions.join import invitation_of
from imagefactory.actions.lock import LockOptions, lock_target
from imagefactory.actions.locked import require_lock
from imagefactory.actions.new_project import plan_addition
from imagefactory.actions.resolve import check_not_cpu, resolve_image
from imagefactory.actions.transfer import copy_image
from imagefactory.errors import ImagefactoryError
from imagefactory.extras.wheels.build import check_not_amd
from imagefactory.model import Target
from imagefactory.oci.store import ImageReference
from imagefactory.progress import QUIET
from imagefactory.project import Project
from imagefactory.settings.choices import SettingValue
from imagefactory.trust.policy import read_trust
from tests.made.factory import NAME
from tests.made.verdicts import NOW

Action = Callable[[Project, Target, Path], object]


def unlocked(factory: Project, target: Target, tmp_path: Path) -> object:
    (factory.lock_folder / f"{NAME}.requirements.txt").unlink()
    return require_lock(factory, target)


def outdated(factory: Project, target: Target, tmp_path: Path) -> object:
    return require_lock(factory, replace(target, requirements=("six",)))


def unbuilt_source(factory: Project, target: Target, tmp_path: Path) -> object:
    return require_lock(factory, replace(target, sources=("./src/lab",)))


def joined(factory: Project, target: Target, tmp_path: Path) -> object:
    center = JoinedCenter(name="chtc", settings=factory.settings, trust=read_trust(()))
    return split_name(f"lab/{NAME}", [center])


def invited(factory: Project, target: Target, tmp_path: Path) -> object:
    registry = SettingValue(value="registry.example.org", origin="test")
    return invitation_of(replace(factory.settings, registry=registry), "", NOW)


def copied(factory: Project, target: Target, tmp_path: Path) -> object:
    place = ImageReference(registry="registry.example.org", repository="gpu/pytorch", tag="2.3")
    return copy_image(factory, place, replace(place, tag=""), NOW, QUIET)


GOLDEN: tuple[tuple[Action, str, str], ...] = (
    (
        lambda factory, target, _: resolve_image(factory, target.name, "", QUIET),
        f"{NAME} is not built",
        f"run imagefactory build {NAME}, or name an image in a registry: HOST/NAME@sha256:...",
    ),
    (
        lambda factory, target, _: resolve_image(factory, "pytorch:9", "", QUIET),
        "no image 'pytorch:9' in {tmp}/store",
        "see imagefactory image list",
    ),
    (
        lambda factory, target, _: check_not_cpu(replace(target, cuda="none", capabilities=())),
        f"{NAME} is only for CPUs, so the GPU suite cannot verify it",
        f"run its smoke test instead: imagefactory build {NAME}",
    ),
    (
        lambda factory, target, _: check_not_amd(replace(target, cuda="rocm7")),
        f"{NAME} is for AMD GPUs: imagefactory has no compiler for them",
        "compile it on a machine with ROCm, and write ./wheels/NAME.whl in the recipe",
    ),
    (
        unlocked,
        f"{NAME} has no lock ({{tmp}}/root/lockfiles/{NAME}.requirements.txt)",
        f"run imagefactory lock {NAME}",
    ),
    (outdated, f"the lock of {NAME} is outdated: the recipe has changed", f"run imagefactory lock {NAME}"),
    (
        unbuilt_source,
        f"{NAME} has sources without a wheel: ./src/lab",
        f"run imagefactory lock {NAME} --build",
    ),
    (
        lambda factory, target, _: lock_target(factory, target, LockOptions(note="a"), QUIET),
        f"{NAME}: only a lock with conda packages can have a note",
        "write it as a comment in the recipe (recipes/pytorch.yaml:32:5)",
    ),
    (
        lambda factory, target, _: check_build(BuildOptions(engine="apptainer", runner="unshare")),
        "runner 'unshare' cannot start .sif files",
        "use --runner apptainer, or --no-test",
    ),
    (
        lambda factory, target, _: plan_addition(factory, "pytroch", "2.6", ""),
        "this project has no family 'pytroch'",
        "did you mean 'pytorch'?",
    ),
    (
        lambda factory, target, _: inspect_place(factory, lambda: factory, "./none.so", QUIET),
        "./none.so does not exist",
        "pass an existing file or directory, an image or a target",
    ),
    (joined, "you have not joined a center 'lab'", "joined centers: chtc"),
    (
        invited,
        "this project trusts no key, so readers could not trust its catalog",
        "create and trust a key: imagefactory key create NAME && imagefactory key trust NAME",
    ),
    (
        copied,
        "the destination 'registry.example.org/gpu/pytorch' must have a tag and no digest",
        "use HOST/NAME:TAG: the copy has the same digest",
    ),
)


@pytest.mark.parametrize(("action", "message", "hint"), GOLDEN, ids=[row[1] for row in GOLDEN])
def test_words(
    factory: Project, target: Target, tmp_path: Path, action: Action, message: str, hint: str
) -> None:
    with pytest.raises(ImagefactoryError) as caught:
        action(factory, target, tmp_path)
    assert caught.value.message == message.replace("{tmp}", str(tmp_path))
    assert caught.value.hint == hint
