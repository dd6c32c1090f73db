"""Read the files in recipes/, with limits on their size."""

from __future__ import annotations

import re
from pathlib import Path

from imagefactory.errors import Diagnostic, RecipeError, UsageError, os_reason
from imagefactory.model import BaseSpec, SourceLocation
from imagefactory.recipes.bases import BASES_FILE, parse_bases
from imagefactory.recipes.family import Recipe
from imagefactory.recipes.recipe import parse_recipe
from imagefactory.recipes.yaml_tree import MAX_BYTES, first_place, recipe_problem, show, too_large


def read_recipes(directory: Path) -> tuple[Recipe, ...]:
    """Return all recipes of a directory, sorted by file name.

    Raises UsageError if the directory is missing, RecipeError with the problems of all files.
    """
    recipes, faults = read_each(directory)
    if faults:
        raise RecipeError([fault for diagnostics in faults.values() for fault in diagnostics])
    return recipes


def read_each(directory: Path) -> tuple[tuple[Recipe, ...], dict[str, tuple[Diagnostic, ...]]]:
    """Return the valid recipes, sorted by file name, and the problems of the other files by family.

    Raises UsageError if the directory is missing.
    """
    if not directory.is_dir():
        raise UsageError(
            "project-not-found",
            f"no recipes in {show(str(directory), limit=200)}",
            hint="pass the project's directory with -C DIR, or create a recipe: imagefactory recipe new "
            "FAMILY",
        )
    recipes: list[Recipe] = []
    faults: dict[str, tuple[Diagnostic, ...]] = {}
    for path in sorted(directory.iterdir()):
        if path.name.startswith(".") or path.suffix not in (".yaml", ".yml") or path.name == BASES_FILE:
            continue
        try:
            recipe = parse_recipe(*read_file(path))
        except RecipeError as error:
            faults[path.stem] = error.diagnostics
            continue
        if recipe.family == path.stem:
            recipes.append(recipe)
        else:
            message = f"the family {show(recipe.family)} does not match the name of its file"
            write = f"rename it to {recipe.family}.yaml, or write family: {path.stem}"
            faults[path.stem] = (Diagnostic("family-name-mismatch", str(recipe.where), message, write),)
    return tuple(recipes), faults


def read_bases(directory: Path) -> tuple[BaseSpec, ...]:
    """Return the bases of `directory`/bases.yaml. Raises RecipeError, also for a missing file."""
    return parse_bases(*read_file(directory / BASES_FILE))


def read_file(path: Path) -> tuple[str, str]:
    """Return the file's text, and its name in errors (`recipes/pytorch.yaml`)."""
    file = f"{path.parent.name}/{show(path.name)[1:-1]}"
    start = first_place(file)
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*\.yaml", path.name, re.ASCII):
        message = "a recipe's file name may have only letters, digits and . _ -"
        raise recipe_problem(start, "file-name-invalid", message, "rename it to FAMILY.yaml")
    try:
        if path.resolve().parent != path.parent.resolve():
            message = "the recipe is a link to outside its directory"
            raise recipe_problem(
                start, "link-not-allowed", message, "replace the link by a copy of its target"
            )
        if path.exists() and not path.is_file():
            raise recipe_problem(start, "not-a-file", "the recipe is not a file", "replace it by a file")
        with path.open("rb") as stream:
            data = stream.read(MAX_BYTES + 1)
    except OSError as error:
        message = f"cannot read the recipe: {os_reason(error)}"
        raise recipe_problem(start, "file-not-readable", message, "check its permissions") from error
    if len(data) > MAX_BYTES:
        raise too_large(file)
    try:
        return data.decode("utf-8"), file
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        column = error.start - data.rfind(b"\n", 0, error.start)
        location = SourceLocation(file=file, line=line, column=column)
        raise recipe_problem(
            location, "not-utf8", "the line is not UTF-8 text", "save the file as UTF-8"
        ) from error
