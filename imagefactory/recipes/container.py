"""What a container file has said so far: Dockerfiles and apptainer's definitions are read into this state."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from posixpath import basename, dirname, join, normpath

from imagefactory.model import Where
from imagefactory.recipes.base_images import BaseImage, read_base_image
from imagefactory.recipes.framework_row import FRAMEWORKS, pypi_name
from imagefactory.recipes.image_parts import keep_files, keep_workdir
from imagefactory.recipes.match_spec import parse_spec
from imagefactory.recipes.pip_lines import Beside
from imagefactory.recipes.shell_words import MOST_CHARACTERS, Word
from imagefactory.recipes.values import OWNED_VARIABLES
from imagefactory.recipes.wish import Wish, take_channel
from imagefactory.recipes.yaml_tree import Limits, refused, show, too_large

LIMITS = Limits(size=256 * 1024)
_MOST_LOOKS = 200
"""At files beside, for all names that commands write."""
_OWN_BASE = "the recipe stands on a base of its own: docs/recipes.md says how to keep this one"


def check_text(text: str, file: str) -> None:
    """Raises RecipeError for a text that is too large, or holds characters that no such file has."""
    if len(text) > LIMITS.size:
        raise too_large(file, LIMITS)
    if found := re.search(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]", text):
        before = text[: found.start()]
        column = found.start() - before.rfind("\n")
        where = Where(file=file, line=before.count("\n") + 1, column=column)
        raise refused(where, f"holds the character {found[0]!a}, which cannot be seen", "remove it")


@dataclass(frozen=True, slots=True, kw_only=True)
class Around:
    """How files beside are read: pip's by `inside` (bounds on Python), others by `parse` (text and name)."""

    inside: Callable[[str], Beside]
    parse: Callable[[str, str], Wish]


@dataclass(frozen=True, slots=True)
class Copied:
    """`told` is the line that says it was left."""

    sources: tuple[str, ...]
    to: str
    told: str = ""


@dataclass(slots=True, kw_only=True)
class Container:
    """One image as far as it is read.

    `variables` are those that words may hold, `own` those of them that stay; `packages_only` is for a
    stage of which only files are taken.
    """

    wish: Wish
    around: Around
    variables: dict[str, str] = field(default_factory=dict)
    workdir: str = "/"
    own: set[str] = field(default_factory=set)
    copies: list[Copied] = field(default_factory=list)
    packages_only: bool = False
    below: BaseImage | None = None
    below_where: Where | None = None
    looks: int = 0

    def leave(self, where: Where, what: str, do: str) -> None:
        if not self.packages_only:
            self.wish.leave(where, what, do)

    @property
    def beside(self) -> Beside:
        return self.around.inside(self.wish.python)

    # --- what lies below

    def base(self, name: Word) -> None:
        """The image that this one is made from."""
        if self.packages_only:
            return
        if not name.known:
            do = "give the ARG a default, or write the image out"
            self.leave(name.where, f"the base image {show(name.text)} is not known", do)
            return
        below = self.below = read_base_image(name.text)
        self.below_where = name.where
        self.wish.bound_python(below.python, name.where)
        what = f"the base image {show(name.text, limit=100)}"
        if not below.known:
            self.leave(
                name.where, f"{what}: what it holds is not known", f"add what must be there; {_OWN_BASE}"
            )
        elif str(below):
            more = f"{below.told}; " if below.told else ""
            self.leave(name.where, f"{what} was read as {below}", f"{more}{_OWN_BASE}")
        else:
            self.leave(name.where, f"{what} is not taken", _OWN_BASE)

    def finish(self) -> None:
        """Takes what the base image brings, where nothing above replaces it."""
        below, wish = self.below, self.wish
        if below is None or self.below_where is None or self.packages_only:
            return
        for channel in below.channels if wish.conda or wish.channels else ():
            take_channel(wish, channel, self.below_where)
        by_conda = {FRAMEWORKS.get(parse_spec(text).name) for text in wish.conda}
        pinned = [text for text in wish.pip if pypi_name(text) == below.framework and "==" in text]
        if below.framework and below.framework not in by_conda and not pinned:
            wish.pip.insert(0, f"{below.framework}=={below.version}" if below.version else below.framework)
            wish.hints += [f"cuda{below.cuda}"] if "." in below.cuda else []
        wish.below = below.cuda if "." in below.cuda else ""

    # --- what is set

    def set(self, name: str, value: Word) -> None:
        """A variable of the image."""
        self.own.add(name)
        self.remember(name, value)
        if self.packages_only:
            return
        if value.known or name in OWNED_VARIABLES:
            self.wish.variable(name, value.text, value.where)
        else:
            what = f"{show(name)} is made of what the image below or a shell sets: {show(value.text)}"
            self.leave(value.where, what, "set it where the image runs")

    def remember(self, name: str, value: Word) -> None:
        """A variable for the words that follow."""
        if value.known and len(value.text) < MOST_CHARACTERS:
            self.variables[name] = value.text
        else:
            self.variables.pop(name, None)

    def go(self, folder: Word) -> None:
        self.workdir = normpath(join(self.workdir, folder.text))
        if not self.packages_only:
            keep_workdir(self.wish, self.workdir, folder.where)

    # --- what is copied

    def copy(self, sources: Sequence[str], to: str, where: Where) -> None:
        """Files beside, and where they lie inside."""
        place = join(self.workdir, to)
        told = "" if self.packages_only else keep_files(self.wish, sources, to, where)
        self.copies.append(Copied(tuple(sources), place, told))

    def find(self, path: str) -> str:
        """The file beside that lies at a path inside, empty where none is there to be read."""
        place = normpath(join(self.workdir, path))
        for copied in reversed(self.copies):
            for name in _origins(copied, place):
                self.looks += 1
                if self.looks > _MOST_LOOKS:
                    return ""
                if self.beside.read(name) is not None:
                    self._was_read(copied, name)
                    return name
        return ""

    def _was_read(self, copied: Copied, name: str) -> None:
        """What was copied to be read, and is taken by its content, is not left out."""
        if copied.told in self.wish.left and [normpath(source) for source in copied.sources] == [name]:
            self.wish.left.remove(copied.told)


def _origins(copied: Copied, place: str) -> Iterator[str]:
    """Where a file inside may come from."""
    folder = normpath(copied.to)
    for written in copied.sources:
        if re.search(r"://|^<<|^git@", written):
            continue
        source = normpath(written.lstrip("/") or ".")
        if len(copied.sources) == 1 and not copied.to.endswith("/") and place == folder:
            yield source
        if dirname(place) == folder and fnmatchcase(basename(place), basename(source)):
            yield normpath(join(dirname(source), basename(place)))
        if place.startswith(f"{folder.rstrip('/')}/"):
            yield normpath(join(source, place[len(folder.rstrip("/")) + 1 :]))
