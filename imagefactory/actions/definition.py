"""From a target and its locks to its definition, and to the texts of its folder."""

from __future__ import annotations

from dataclasses import replace

from imagefactory.project import Factory
from imagefactory.lock.pypi.local import local_files
from imagefactory.model import Definition, Target
from imagefactory.build.definition import define
from imagefactory.build.folders import check_definitions, copied_files, render, write_definitions
from imagefactory.build.steps import LARGEST_COPY
from imagefactory.actions.locked import locks_below, named_below, require_lock
from imagefactory.stages.own_files import find_own_files


def define_target(factory: Factory, target: Target) -> Definition:
    """What an image of the target is made of. Raises LockError where it is not locked, StaleError."""
    lock, under = require_lock(factory, target), locks_below(factory, target)
    files = find_own_files(factory.settings.root_path, target.files)
    made = define(target, factory.base_of(target), lock, under, files)
    return replace(
        made,
        local=local_files(lock, factory.settings.root_path),
        named_below=named_below(factory, target),
    )


def render_target(factory: Factory, target: Target) -> dict[str, str]:
    """The texts of definitions/<target>/, by file name."""
    return render(define_target(factory, target))


def write_definition(factory: Factory, target: Target, *, check: bool = False) -> tuple[str, ...]:
    """What of definitions/<target>/ was stale; it is written then, unless this is a `check`."""
    definition, folder = define_target(factory, target), factory.definition_folder(target)
    files = render(definition)
    copied = copied_files(definition, largest=LARGEST_COPY)
    stale = check_definitions(folder, files, copied)
    if stale and not check:
        write_definitions(folder, files, copied)
    return stale
