"""What container files say of the image beside its packages and variables: into `Wish.parts`, as far as a
recipe can say it; draft.py writes it."""

from __future__ import annotations

import re
from collections.abc import Sequence

from imagefactory.model import Where
from imagefactory.recipes.values import RULES
from imagefactory.recipes.wish import Wish
from imagefactory.recipes.yaml_tree import show

SHELL = ("/bin/sh", "-c")
_LONG = 400
_PYTHON = re.compile(r"python3?(\.[0-9]+)?(-(dev|venv|pip|distutils|setuptools|wheel|minimal|full))?")


def keep_debian(wish: Wish, names: Sequence[str], where: Where) -> None:
    """Packages of Debian, versions dropped. Python is the environment's own, not of these."""
    plain = {name: re.sub(r"[=/:].*$", "", name) for name in names}
    rule = RULES["debian package"]
    taken = [name for name in plain.values() if rule.allows(name) and not _PYTHON.fullmatch(name)]
    wish.parts.debian += [name for name in taken if name not in wish.parts.debian]
    left = [name for name, short in plain.items() if short not in taken]
    if left:
        do = "the base and the environment bring Python; write others under 'system'"
        wish.leave(where, f"apt-get install {show(' '.join(left), limit=_LONG)[1:-1]}", do)


def keep_files(wish: Wish, sources: Sequence[str], to: str, where: Where) -> str:
    """Files that are copied: where they lie in the factory, a person must say. The line that tells it is
    returned: it goes where the file is read instead."""
    what = f"COPY {show(' '.join(sources), limit=_LONG)[1:-1]} to {show(to)}"
    wish.leave(where, what, "write files: {FOLDER: [PATH]}, each path from the factory's root on")
    return wish.left[-1]


def keep_workdir(wish: Wish, folder: str, where: Where) -> None:
    wish.parts.workdir = folder if RULES["workdir"].allows(folder) else ""
    if not wish.parts.workdir and folder != "/":
        wish.leave(where, f"WORKDIR {show(folder)}", f"write workdir: with {RULES['workdir'].write}")


def keep_user(wish: Wish, user: str, where: Where) -> None:
    wish.parts.user = user if RULES["user"].allows(user) else ""
    if not wish.parts.user and user != "root":
        wish.leave(where, f"USER {show(user)}", f"write user: with {RULES['user'].write}")


def keep_entrypoint(wish: Wish, words: Sequence[str], where: Where, said: str = "ENTRYPOINT") -> str:
    wish.parts.entrypoint = _allowed(words)
    return _told(wish, words, where, said)


def keep_command(wish: Wish, words: Sequence[str], where: Where, said: str = "CMD") -> str:
    wish.parts.command = _allowed(words)
    return _told(wish, words, where, said)


def _allowed(words: Sequence[str]) -> tuple[str, ...]:
    return tuple(words) if all(RULES["argument"].allows(word) for word in words) else ()


def _told(wish: Wish, words: Sequence[str], where: Where, said: str) -> str:
    """The line that tells what cannot be a key, empty where it can."""
    if not words or _allowed(words):
        return ""
    command = show(words[2] if tuple(words[:2]) == SHELL else " ".join(words), limit=_LONG)
    wish.leave(where, f"{said} {command}", "put it into a script among the files, and write that")
    return wish.left[-1]
