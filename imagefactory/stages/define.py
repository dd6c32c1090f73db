"""From a target and its locks to its definition, and to the texts of its folder."""

from __future__ import annotations

from imagefactory.factory import Factory
from imagefactory.model import Definition, Target
from imagefactory.render.define import define
from imagefactory.render.folders import render
from imagefactory.stages.locked import locks_below, require_lock


def define_target(factory: Factory, target: Target) -> Definition:
    """What an image of the target is made of. Raises LockError where it is not locked, StaleError."""
    lock, under = require_lock(factory, target), locks_below(factory, target)
    return define(target, factory.base_of(target), lock, under)


def render_target(factory: Factory, target: Target) -> dict[str, str]:
    """The texts of definitions/<target>/, by file name."""
    return render(define_target(factory, target))
