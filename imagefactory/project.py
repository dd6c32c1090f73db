"""A project: the expanded recipes of a directory, and its connections."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from imagefactory.access import Access
from imagefactory.errors import Diagnostic, RecipeError, UsageError
from imagefactory.lock.pypi.requirements import digest
from imagefactory.model import BaseSpec, Target
from imagefactory.progress import QUIET
from imagefactory.recipes.bases import BASES_FILE
from imagefactory.recipes.expand import expand_lenient, select, select_single
from imagefactory.recipes.names import families_of
from imagefactory.recipes.read import read_bases, read_each
from imagefactory.settings.load import Settings

PROJECT_DIRECTORIES = ("recipes", "lockfiles", "definitions", "wheels")
"""The directories of a project that commands read and write."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Project(Access):
    """The expanded recipes of a directory, and the connections that this call uses."""

    bases: tuple[BaseSpec, ...]
    targets: tuple[Target, ...]
    invalid: Mapping[str, tuple[Diagnostic, ...]] = field(default_factory=dict)
    """The problems of invalid recipes by family. Their targets are not in `targets`."""

    @property
    def faults(self) -> tuple[Diagnostic, ...]:
        """The problems of all invalid recipes."""
        return tuple(problem for problems in self.invalid.values() for problem in problems)

    def select(self, names: Sequence[str]) -> tuple[Target, ...]:
        """Return the targets that `names` select, all if it is empty. A note lists the other invalid recipes.

        Raises RecipeError if an invalid recipe may have such a target, else as `recipes.expand.select`.
        """
        if problems := self.problems_of(names):
            raise RecipeError(problems, hint="" if names else "fix them, or pass the names of other targets")
        return select(self.targets, names)

    def select_single(self, name: str) -> Target:
        """Return the one target that `name` selects. Raises UsageError for several, else as `select`."""
        self.select((name,))
        return select_single(self.targets, name)

    def problems_of(self, names: Sequence[str]) -> tuple[Diagnostic, ...]:
        """Return the problems of the invalid recipes whose targets `names` may select, of all without names.

        A note lists the other invalid recipes.
        """
        known = {target.name: target.family for target in self.targets}
        families = families_of(names, known, self.invalid) if names else frozenset(self.invalid)
        self.note_invalid(family for family in self.invalid if family not in families)
        return tuple(
            problem for family in self.invalid if family in families for problem in self.invalid[family]
        )

    def note_invalid(self, families: Iterable[str]) -> None:
        """Print a note that the recipes of these families are skipped, if there are any."""
        if skipped := tuple(families):
            self.tell(f"note: {invalid_note(skipped)}")

    def target(self, name: str) -> Target | None:
        return next((target for target in self.targets if target.name == name), None)

    def target_below(self, target: Target) -> Target | None:
        """Return the target's parent, None without one."""
        return self.target(target.on)

    def base_of(self, target: Target) -> BaseSpec:
        return next(base for base in self.bases if base.name == target.base)

    def base_below(self, base: BaseSpec) -> BaseSpec | None:
        """Return the base's parent, None without one."""
        return next((parent for parent in self.bases if parent.name == base.on), None)

    @property
    def lock_folder(self) -> Path:
        return self.settings.root_path / "lockfiles"

    def base_lock_path(self, base: BaseSpec) -> Path:
        return self.lock_folder / "bases" / f"{base.name}.lock"

    def definition_folder(self, target: Target) -> Path:
        return self.settings.root_path / "definitions" / target.name


def invalid_note(families: Sequence[str]) -> str:
    verb = "recipe is" if len(families) == 1 else "recipes are"
    names = ", ".join(families)
    return f"{len(families)} other {verb} invalid ({names}): `imagefactory list` shows the problems"


def is_project(settings: Settings) -> bool:
    """Return whether the root has its own recipes, not the bundled ones."""
    return not settings.shipped and (settings.root_path / "recipes" / BASES_FILE).exists()


def has_catalog(settings: Settings) -> bool:
    """Return whether the settings name a catalog."""
    return bool(settings.catalog.value or settings.registry.value or settings.centers)


def uses_catalog(settings: Settings) -> bool:
    """Return whether images come from the catalog: no project, no `-C` for one, and a catalog is set."""
    return settings.root.origin != "-C" and not is_project(settings) and has_catalog(settings)


def require_own_project(settings: Settings, message: str) -> None:
    """Raise UsageError if `message` would write into the bundled recipes."""
    if settings.shipped:
        raise UsageError(
            "project-not-found",
            f"{message} needs a project, and no imagefactory.toml is here or in a parent directory",
            hint="create one: imagefactory init (--with pytorch,jax adds recipes)",
        )


def recipes_directory(settings: Settings) -> Path:
    """Return the directory of the recipes. Raises UsageError if the root is not a project."""
    if not settings.shipped and not is_project(settings):
        raise UsageError(
            "project-not-found",
            f"{settings.root_path} is not a project: it has no recipes/{BASES_FILE}",
            hint=f"create one: imagefactory init {shlex.quote(str(settings.root_path))}",
        )
    return settings.root_path / "recipes"


def load_project(
    settings: Settings, environ: Mapping[str, str], tell: Callable[[str], object] = QUIET.note
) -> Project:
    """Return all recipes and bases of the root. Raises RecipeError with all problems of all files."""
    project = load_lenient(settings, environ, tell)
    if project.invalid:
        raise RecipeError(project.faults)
    return project


def load_lenient(
    settings: Settings, environ: Mapping[str, str], tell: Callable[[str], object] = QUIET.note
) -> Project:
    """Return the valid recipes, and the problems of the others. Raises RecipeError for bases.yaml."""
    directory = recipes_directory(settings)
    if not settings.shipped:
        _check_no_outside_links(settings.root_path)
    recipes, faults = read_each(directory)
    bases, targets, invalid = expand_lenient(recipes, read_bases(directory), faults)
    targets = tuple(_with_frozen_digest(settings.root_path, target) for target in targets)
    return Project(
        settings=settings, environ=environ, tell=tell, bases=bases, targets=targets, invalid=invalid
    )


def _with_frozen_digest(root: Path, target: Target) -> Target:
    """Return the target with the digest of the lock file of another tool, if its packages come from one."""
    if target.frozen is None:
        return target
    path = root / target.frozen.file
    inside = path.is_file() and path.resolve().is_relative_to(root.resolve())
    return replace(target, frozen=replace(target.frozen, sha256=digest(path) if inside else ""))


def _check_no_outside_links(root: Path) -> None:
    """Raise UsageError for links to outside the project, which a clone may have and commands would follow."""
    top = root.resolve()
    for directory in (root / name for name in (*PROJECT_DIRECTORIES, "lockfiles/bases")):
        entries = directory.iterdir() if directory.is_dir() else ()
        for path in (directory, *entries):
            if path.is_symlink() and not path.resolve().is_relative_to(top):
                raise UsageError(
                    "link-leaves-project",
                    f"{path} is a symbolic link to outside the project {root}",
                    hint="replace the link by a copy of its target",
                )
