"""A factory: the recipes of a root, expanded, and how this call reaches what they need.

Package index, channels, Debian's archive and stores are named by settings; here the settings meet the rooms.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from imagefactory.errors import UsageError
from imagefactory.model import Base, Target
from imagefactory.oci.layout import Layout
from imagefactory.recipes.bases import BASES_FILE, all_bases
from imagefactory.recipes.expand import expand_all
from imagefactory.recipes.read import read_bases, read_recipes
from imagefactory.settings.load import Settings

if TYPE_CHECKING:
    pass


@dataclass(frozen=True, slots=True, kw_only=True)
class Factory:
    """The recipes of a root, expanded, and the settings and environment of this call."""

    settings: Settings
    environ: Mapping[str, str]
    bases: tuple[Base, ...]
    targets: tuple[Target, ...]

    def base_of(self, target: Target) -> Base:
        return next(base for base in self.bases if base.name == target.base)

    def target_below(self, target: Target) -> Target | None:
        """The target that this one is built on."""
        return next((one for one in self.targets if one.name == target.on), None)

    @property
    def lock_folder(self) -> Path:
        return self.settings.root_path / "lockfiles"

    def base_lock_path(self, base: Base) -> Path:
        return self.lock_folder / "bases" / f"{base.name}.lock"

    def definition_folder(self, target: Target) -> Path:
        return self.settings.root_path / "definitions" / target.name

    @property
    def layout(self) -> Layout:
        return Layout(self.settings.store_path)


def is_factory(settings: Settings) -> bool:
    """Whether the root has recipes."""
    return (settings.root_path / "recipes" / BASES_FILE).exists()


def recipes_folder(settings: Settings) -> Path:
    """The folder of recipes. Raises UsageError where the root is no factory."""
    folder = settings.root_path / "recipes"
    if not is_factory(settings):
        raise UsageError(
            f"{settings.root_path} is no factory: it has no recipes/{BASES_FILE}",
            hint="go to one, or name it: imagefactory -C DIR ...",
        )
    return folder


def read_factory(settings: Settings, environ: Mapping[str, str]) -> Factory:
    """All recipes and bases below the root. Raises RecipeError with every fault of every file."""
    folder = recipes_folder(settings)
    recipes = read_recipes(folder)
    bases = all_bases(read_bases(folder), recipes)
    targets = expand_all(recipes, bases)
    return Factory(settings=settings, environ=environ, bases=bases, targets=targets)
