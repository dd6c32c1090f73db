"""What container files say that no recipe has a key for yet: kept in `Wish.parts`, and told as left out.

A part that gets a key is written by draft.py, and its line here goes.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from imagefactory.model import Where
from imagefactory.recipes.values import RULES
from imagefactory.recipes.wish import Wish
from imagefactory.recipes.yaml_tree import show

SHELL = ("/bin/sh", "-c")
_LONG = 400
_BASE = "a base of your own brings them: packages in recipes/bases.yaml"
_START = "say it where the image runs: imagefactory run TARGET -- COMMAND"


def keep_debian(wish: Wish, names: Sequence[str], where: Where) -> None:
    """Packages of Debian, versions dropped."""
    plain = [re.sub(r"[=/:].*$", "", name) for name in names]
    known = [name for name in plain if RULES["debian package"].allows(name)]
    wish.parts.debian += [name for name in known if name not in wish.parts.debian]
    wish.leave(where, f"apt-get install {show(' '.join(names), limit=_LONG)[1:-1]}", _BASE)


def keep_files(wish: Wish, sources: Sequence[str], to: str, where: Where) -> str:
    """Files that are copied. The line that tells it is returned: it goes where the file is read instead."""
    wish.parts.files += [(source, to) for source in sources]
    what = f"COPY {show(' '.join(sources), limit=_LONG)[1:-1]} to {show(to)}"
    wish.leave(where, what, "mount it where the image runs, or make it a package on an index")
    return wish.left[-1]


def keep_workdir(wish: Wish, folder: str, where: Where) -> None:
    wish.parts.workdir = folder
    wish.leave(where, f"WORKDIR {show(folder)}", "say it where the image runs: imagefactory run --workdir")


def keep_user(wish: Wish, user: str, where: Where) -> None:
    wish.parts.user = user
    wish.leave(where, f"USER {show(user)}", "say it where the image runs: imagefactory run --user")


def keep_entrypoint(wish: Wish, words: Sequence[str], where: Where, said: str = "ENTRYPOINT") -> None:
    wish.parts.entrypoint = tuple(words)
    wish.leave(where, f"{said} {_command(words)}", _START)


def keep_command(wish: Wish, words: Sequence[str], where: Where, said: str = "CMD") -> None:
    wish.parts.command = tuple(words)
    wish.leave(where, f"{said} {_command(words)}", _START)


def _command(words: Sequence[str]) -> str:
    return show(words[-1] if tuple(words[:-1]) == SHELL else " ".join(words), limit=_LONG)
