"""A factory of one's own: an empty one, or with families of those that come with this program."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from imagefactory.errors import NothingSelectedError, UsageError, os_problem
from imagefactory.project import read_factory
from imagefactory.fs import replace_text
from imagefactory.lock.files import UNSOLVABLE, lock_names
from imagefactory.lock.layers import LAYERS
from imagefactory.model import Target
from imagefactory.recipes.bases import BASES_FILE
from imagefactory.recipes.expand import select_one
from imagefactory.recipes.read import read_bases
from imagefactory.settings.choices import Setting
from imagefactory.settings.files import FILE_NAME
from imagefactory.settings.load import SHIPPED, Settings
from imagefactory.versions import natural, nearest

SETTINGS = """\
# The factory's settings; this file marks its root. `imagefactory settings` prints each one, its value and
# where that came from. Here belongs what holds for everybody who works in this factory, such as
# registry = "registry.example.org/images"
# Most settings count only for users who ran `imagefactory settings --trust` here since the last change.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class NewFactory:
    """`families` are those that came along, also for being built on; `written` are names below its root.

    `target` is one that can be built at once, the newest of the first family that was asked for; empty
    where none was.
    """

    families: tuple[str, ...]
    written: tuple[str, ...]
    target: str = ""


def make_factory(
    root: Path,
    wanted: tuple[str, ...],
    settings: Settings,
    environ: Mapping[str, str],
    nights: Mapping[str, str] | None = None,
) -> NewFactory:
    """Writes into `root` the bases and the `wanted` families of SHIPPED, and those that they are built on.

    `nights` are further files, as `night_files` returns them. What is there is left as it is. Raises
    NothingSelectedError for a family that there is not, and UsageError, before anything is written, where a
    recipe or lock of a family, or one of `nights`, is there and is another one.
    """
    nights = nights or {}
    targets = shipped_targets(settings, environ)
    families = _with_those_below(targets, wanted)
    always = _always()
    theirs = _theirs(targets, families, always)
    texts = {name: (SHIPPED / name).read_text(encoding="utf-8") for name in (*always, *theirs)}
    texts |= {FILE_NAME: SETTINGS, **nights}
    try:
        there = {name for name in texts if os.path.lexists(root / name)}
        for name in sorted(there.intersection((*theirs, *nights))):
            if (root / name).read_text(encoding="utf-8", errors="replace") != texts[name]:
                raise UsageError(
                    "file-exists",
                    f"{root / name} exists and differs from the file of imagefactory; nothing was written",
                    hint="rename it, repeat the command, and merge the two"
                    if name in nights
                    else "choose a new directory: imagefactory init DIR",
                )
        written = tuple(sorted(texts.keys() - there))
        for name in written:
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            replace_text(root / name, texts[name])
    except OSError as error:
        raise UsageError(
            *os_problem("write", error.filename or root, error),
            hint="choose a directory that you may write to",
        ) from error
    newest = [target for target in targets if wanted and target.family == wanted[0]]
    newest.sort(key=lambda target: (natural(target.version), -len(target.name)))
    return NewFactory(families=families, written=written, target=newest[-1].name if newest else "")


def shipped_targets(settings: Settings, environ: Mapping[str, str]) -> tuple[Target, ...]:
    """Return the targets that come with imagefactory."""
    shipped = replace(settings, root=Setting(value=str(SHIPPED), origin="init"))
    return read_factory(shipped, environ).targets


def find_shipped(name: str, settings: Settings, environ: Mapping[str, str]) -> Target | None:
    """Return the shipped target `name`; None where the project has a recipe of its family, or none is."""
    try:
        found = select_one(shipped_targets(settings, environ), name)
    except NothingSelectedError:
        return None
    return None if (settings.root_path / "recipes" / f"{found.family}.yaml").exists() else found


def _with_those_below(targets: Iterable[Target], wanted: Iterable[str]) -> tuple[str, ...]:
    """`wanted` and the families that their targets are built on, sorted."""
    by_name = {target.name: target for target in targets}
    known = sorted({target.family for target in by_name.values()})
    found: set[str] = set()
    waiting = list(wanted)
    while waiting:
        family = waiting.pop()
        if family not in known:
            near = nearest(family, known)
            raise NothingSelectedError(
                "family-unknown",
                f"imagefactory has no family '{family}'",
                hint=f"did you mean '{near}'?" if near else f"available families: {', '.join(known)}",
            )
        if family not in found:
            found.add(family)
            waiting += [by_name[t.on].family for t in by_name.values() if t.family == family and t.on]
    return tuple(sorted(found))


def _always() -> list[str]:
    """The files that any factory has, by their names below the root."""
    recipes = SHIPPED / "recipes"
    paths = (recipes / BASES_FILE, *recipes.glob("*.schema.json"))
    locks = (SHIPPED / _base_lock(base.name) for base in read_bases(recipes))
    return [str(path.relative_to(SHIPPED)) for path in (*paths, *locks) if path.exists()]


def _base_lock(name: str) -> str:
    return f"lockfiles/bases/{name}.lock"


def _theirs(targets: Iterable[Target], families: tuple[str, ...], always: Sequence[str]) -> list[str]:
    """The files of families, beside those that are there `always`."""
    names = [f"recipes/{family}.yaml" for family in families]
    for target in targets:
        if target.family in families:
            kept = (
                *lock_names(target.name, conda=target.conda),
                *(f"{target.name}.{kind}" for kind in (UNSOLVABLE, LAYERS)),
            )
            names += [f"lockfiles/{name}" for name in kept if (SHIPPED / "lockfiles" / name).exists()]
            base = _base_lock(target.base)  # of its own: for its platform, or with packages of its recipe
            names += [base] if base not in always and (SHIPPED / base).exists() else []
    return names
