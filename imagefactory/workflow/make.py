"""From a lock to an image that was tried, and into a registry."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from imagefactory.project import Factory
from imagefactory.model import Target
from imagefactory.progress import Progress
from imagefactory.actions.build import BuildOptions, Built, build_image, check_build
from imagefactory.actions.definition import define_target
from imagefactory.actions.transfer import Pushed, PushOptions, push_target


@dataclass(frozen=True, slots=True, kw_only=True)
class Making:
    """`push` is None for an image that stays here; `built` hears of it before it is sent anywhere."""

    build: BuildOptions
    push: PushOptions | None
    built: Callable[[Built], None]


def make_image(factory: Factory, target: Target, making: Making, progress: Progress) -> Pushed | None:
    """From the lock that `imagefactory lock` wrote to an image that was tried; what passed is pushed."""
    check_build(making.build)
    definition = define_target(factory, target)
    built = build_image(factory, definition, making.build, progress)
    making.built(built)
    if making.push is None or not built.passed:
        return None
    return push_target(factory, target, replace(making.push, made=built.image), progress)
