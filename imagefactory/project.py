"""A factory: the recipes of a root, expanded, with this call's access to what they need."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from imagefactory.access import Access
from imagefactory.errors import Diagnostic, RecipeError, UsageError
from imagefactory.model import BaseSpec, Target
from imagefactory.progress import QUIET
from imagefactory.recipes.bases import BASES_FILE
from imagefactory.recipes.expand import expand_lenient
from imagefactory.recipes.read import read_bases, read_each
from imagefactory.settings.load import Settings

PROJECT_DIRECTORIES = ("recipes", "lockfiles", "definitions", "wheels")
"""The folders of a project that commands read and write."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Project(Access):
    """The recipes of a root, expanded, and this call's access to what they need."""

    bases: tuple[BaseSpec, ...]
    targets: tuple[Target, ...]
    faults: tuple[Diagnostic, ...] = ()
    """Of recipes whose targets are therefore not among `targets`."""

    def base_of(self, target: Target) -> BaseSpec:
        return next(base for base in self.bases if base.name == target.base)

    def base_below(self, base: BaseSpec) -> BaseSpec | None:
        """The base that this one adds packages to."""
        return next((one for one in self.bases if one.name == base.on), None)

    def target_below(self, target: Target) -> Target | None:
        """The target that this one is built on."""
        return next((one for one in self.targets if one.name == target.on), None)

    @property
    def lock_folder(self) -> Path:
        return self.settings.root_path / "lockfiles"

    def base_lock_path(self, base: BaseSpec) -> Path:
        return self.lock_folder / "bases" / f"{base.name}.lock"

    def definition_folder(self, target: Target) -> Path:
        return self.settings.root_path / "definitions" / target.name


def is_project(settings: Settings) -> bool:
    """Whether the root has recipes, and not those that come with this program."""
    return not settings.shipped and (settings.root_path / "recipes" / BASES_FILE).exists()


def has_catalog(settings: Settings) -> bool:
    """Whether a catalogue is named for who has no factory."""
    return bool(settings.catalogue.value or settings.registry.value or settings.centers)


def uses_catalog(settings: Settings) -> bool:
    """Whether the catalogue answers: there is no factory, `-C` names none, and the catalogue is known."""
    return settings.root.origin != "-C" and not is_project(settings) and has_catalog(settings)


def require_own_project(settings: Settings, what: str) -> None:
    """Raises UsageError where `what` would write among the recipes that come with this program."""
    if settings.shipped:
        raise UsageError(
            "project-not-found",
            f"{what} writes into a project, and there is no imagefactory.toml here or in a parent directory",
            hint="create one: imagefactory init (--with pytorch,jax adds recipes)",
        )


def recipes_directory(settings: Settings) -> Path:
    """The folder of recipes. Raises UsageError where the root is no factory."""
    folder = settings.root_path / "recipes"
    if not settings.shipped and not is_project(settings):
        raise UsageError(
            "project-not-found",
            f"{settings.root_path} is not a project: it has no recipes/{BASES_FILE}",
            hint=f"create one: imagefactory init {shlex.quote(str(settings.root_path))}",
        )
    return folder


def load_project(
    settings: Settings, environ: Mapping[str, str], tell: Callable[[str], object] = QUIET.note
) -> Project:
    """All recipes and bases below the root. Raises RecipeError with every fault of every file."""
    factory = load_lenient(settings, environ, tell)
    if factory.faults:
        raise RecipeError(factory.faults)
    return factory


def load_lenient(
    settings: Settings, environ: Mapping[str, str], tell: Callable[[str], object] = QUIET.note
) -> Project:
    """The recipes without a fault, and the faults of the others. Raises RecipeError for bases.yaml's own."""
    folder = recipes_directory(settings)
    if not settings.shipped:
        _check_no_outside_links(settings.root_path)
    recipes, faults = read_each(folder)
    bases, targets, told = expand_lenient(recipes, read_bases(folder), faults)
    return Project(settings=settings, environ=environ, tell=tell, bases=bases, targets=targets, faults=told)


def _check_no_outside_links(root: Path) -> None:
    """Raise UsageError for a folder or file of the project that leads out of it.

    Commands read, write and remove there; a clone may bring such links along.
    """
    top = root.resolve()
    for folder in (root / name for name in (*PROJECT_DIRECTORIES, "lockfiles/bases")):
        entries = folder.iterdir() if folder.is_dir() else ()
        for path in (folder, *entries):
            if path.is_symlink() and not path.resolve().is_relative_to(top):
                raise UsageError(
                    "link-leaves-project",
                    f"{path} is a symbolic link to outside the project {root}",
                    hint="replace it by the file or directory that it points to",
                )
