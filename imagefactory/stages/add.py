"""The stage from a framework's version to a row of its family's recipe, locked and rendered."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from imagefactory.errors import LockError, NothingSelectedError, UsageError, os_problem
from imagefactory.project import Factory, read_sound, recipes_folder
from imagefactory.fs import replace_text
from imagefactory.model import Target
from imagefactory.progress import Progress
from imagefactory.recipes.edit import Addition, add_row
from imagefactory.extras.importers.draft import check_draft
from imagefactory.recipes.read import read_each, read_file
from imagefactory.recipes.recipe import parse_recipe
from imagefactory.actions.definition import write_definition
from imagefactory.actions.lock import LockOptions, Relock, lock_target
from imagefactory.versions import nearest


@dataclass(frozen=True, slots=True, kw_only=True)
class Added:
    """A row that can be written at `path`, and the targets that it adds."""

    path: Path
    addition: Addition
    targets: tuple[Target, ...]


def plan_addition(factory: Factory, family: str, version: str, cuda: str) -> Added:
    """The row of a family for a version. Raises UsageError, RecipeError where it does not fit the recipes."""
    folder = recipes_folder(factory.settings)
    recipes, faults = read_each(folder)
    known = [recipe.family for recipe in recipes]
    if family not in known and family not in faults:
        near = nearest(family, known)
        raise NothingSelectedError(
            "family-unknown",
            f"this project has no family '{family}'",
            hint=f"did you mean '{near}'?" if near else f"imagefactory new {family}",
        )
    path = folder / f"{family}.yaml"
    text, file = read_file(path)
    addition = add_row(text, parse_recipe(text, file), version, cuda)
    others = [recipe for recipe in recipes if recipe.family != family]
    made = check_draft(addition.text, family, others, factory.bases)
    before = {target.name for target in factory.targets}
    return Added(path=path, addition=addition, targets=tuple(t for t in made if t.name not in before))


def make_addition(
    factory: Factory, added: Added, progress: Progress, tell: Callable[[Relock], object]
) -> Iterator[str]:
    """Writes the row, then locks and renders its targets: their names, one by one.

    The row stays where a target cannot be locked. Raises UsageError for a file that cannot be written, and
    as `lock_target` does.
    """
    try:
        replace_text(added.path, added.addition.text)
    except OSError as error:
        raise UsageError(*os_problem("write", added.path, error), hint="check its permissions") from error
    whole = read_sound(factory.settings, factory.environ, factory.tell)
    for target in added.targets:
        try:
            tell(lock_target(whole, target, LockOptions(), progress))
        except LockError as error:
            error.hint += f"; the row is in {added.path}: correct it or delete it"
            raise
        write_definition(whole, target)
        yield target.name
