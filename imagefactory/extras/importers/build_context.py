"""The build context of a container file: the directory that COPY reads, and the files that belong to it.

Sources: Docker's "Build context" (.dockerignore, where patterns are matched as moby/patternmatcher does) and
"COPY". Files are read within limits, and no link is followed out of the directory. Git is not run.
"""

from __future__ import annotations

import codecs
import os
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from posixpath import normpath
from typing import Literal

from imagefactory.errors import UsageError
from imagefactory.recipes.yaml_tree import show

# Of one file; locks of several platforms are large.
MOST_BYTES = 32 * 1024 * 1024
_MARKS = (
    (codecs.BOM_UTF8, "utf-8"),
    (codecs.BOM_UTF32_LE, "utf-32"),  # which begins with the mark of UTF-16
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),  # as PowerShell's > writes
    (codecs.BOM_UTF16_BE, "utf-16"),
)
_CODING = re.compile(rb"coding[:=]\s*([-\w.]+)")
_PLAIN_ENCODING = re.compile(
    rb"utf|latin|iso|cp|windows|ascii|us-ascii|koi8|mac|big5|gb|euc|shift|sjis", re.IGNORECASE
)
_MOST_RULES = 1_000
_MOST_STARS = 3
_MOST_PATTERN = 500
_MOST_ENTRIES = 20_000
"""The limit of names read to expand a glob or to list a directory."""
_PARENTS = 2
"""The number of parent directories to check for a file outside of a git work tree."""

EntryType = Literal["file", "folder", "outside", ""]


@dataclass(frozen=True, slots=True)
class IgnoreRule:
    """A line of .dockerignore: `pieces` are the parts of its pattern, `keeps` is True after `!`.

    `plain` is the pattern as a regular expression, or None if matching it could be slow.
    """

    line: int
    pieces: tuple[str, ...]
    keeps: bool
    plain: re.Pattern[str] | None

    def matches(self, path: str) -> bool:
        """Return whether the rule matches a path or a directory above it."""
        return bool(self.plain.match(path)) if self.plain else _matches(self.pieces, path)


@dataclass(frozen=True, slots=True)
class IgnoreRules:
    """The rules of a .dockerignore. `file` is its path in the context."""

    file: str = ""
    rules: tuple[IgnoreRule, ...] = ()

    def excludes(self, path: str) -> str:
        """Return `file:line` of the rule that excludes a path of the context, empty if none does."""
        last = ""
        for rule in self.rules:
            if bool(last) == rule.keeps and rule.matches(path):
                last = "" if rule.keeps else f"{self.file}:{rule.line}"
        return last


def parse_ignore_rules(text: str, file: str) -> IgnoreRules:
    """Parse a .dockerignore. Raises UsageError if it has too many rules, or too long ones."""
    rules: list[IgnoreRule] = []
    for number, line in enumerate(text.lstrip("\ufeff").splitlines(), 1):
        written = line.strip()
        if not written or line.startswith("#"):
            continue
        keeps = written.startswith("!")
        pattern = normpath(written.removeprefix("!").strip()).lstrip("/")
        if len(rules) >= _MOST_RULES or len(pattern) > _MOST_PATTERN:
            raise UsageError(
                "dockerignore-invalid",
                f"{file}:{number}: too many rules, or a rule is too long",
                hint="remove or shorten rules",
            )
        if pattern not in (".", ""):
            pieces = tuple(_pieces(pattern))
            rules.append(IgnoreRule(number, pieces, keeps, _expression(pieces)))
    return IgnoreRules(file, tuple(rules))


def _pieces(pattern: str) -> Iterator[str]:
    """Yield the pieces of a pattern: `=` and a character, `?`, `*`, `[...]`, `**/` (directories), `**`
    (all).
    """
    position = 0
    while position < len(pattern):
        char = pattern[position]
        if pattern.startswith("**", position):
            rest = pattern[position + 2 :]
            if rest.startswith("/") and rest != "/":
                yield "**/"
                position += 3
            else:
                yield "**" if position == 0 or not rest else "**/"
                position += 2
        elif char == "[" and (match := re.compile(r"\[\^?\]?[^\]]*\]").match(pattern, position)):
            yield match[0]
            position = match.end()
        elif char == "\\" and position + 1 < len(pattern):
            yield f"={pattern[position + 1]}"
            position += 2
        else:
            yield char if char in "*?" else f"={char}"
            position += 1


def _expression(pieces: Sequence[str]) -> re.Pattern[str] | None:
    """Return the pieces as a regular expression that is fast for all paths, None if there is none."""
    stars = sum(piece.startswith("*") for piece in pieces)
    if stars > _MOST_STARS or any(piece.startswith("[") for piece in pieces):
        return None
    known = {"?": "[^/]", "*": "[^/]*", "**": ".*", "**/": "(?:.*/)?"}
    written = "".join(known.get(piece) or re.escape(piece[1:]) for piece in pieces)
    return re.compile(rf"{written}(?:/.*)?\Z", re.DOTALL)


def _matches(pieces: Sequence[str], path: str) -> bool:
    """Return whether a path or a directory above it matches, in time proportional to both lengths.

    A state is the number of pieces passed, and whether it is inside the directories of a `**/`.
    """
    states = _skip_stars(pieces, {(0, False)})
    for char in path:
        if char == "/" and (len(pieces), False) in states:
            return True
        after: set[tuple[int, bool]] = set()
        for position, inside in states:
            piece = pieces[position] if position < len(pieces) else ""
            if piece == "**/":
                after |= {(position, True), (position + 1, False)} if char == "/" else {(position, True)}
            elif piece == "**" or (piece == "*" and char != "/"):
                after.add((position, inside))
            elif _matches_rule(piece, char):
                after.add((position + 1, False))
        states = _skip_stars(pieces, after)
        if not states:
            return False
    return (len(pieces), False) in states


def _matches_rule(piece: str, char: str) -> bool:
    if piece.startswith("["):
        negated = piece.startswith("[^")
        return char != "/" and fnmatchcase(char, f"[!{piece[2:]}" if negated else piece)
    return piece == f"={char}" or (piece == "?" and char != "/")


def _skip_stars(pieces: Sequence[str], states: set[tuple[int, bool]]) -> set[tuple[int, bool]]:
    """Return the states and those reached without a character, since a star may match an empty text."""
    reached = set(states)
    todo = list(states)
    while todo:
        position, inside = todo.pop()
        empty = position < len(pieces) and pieces[position] in ("*", "**", "**/") and not inside
        if empty and (position + 1, False) not in reached:
            reached.add((position + 1, False))
            todo.append((position + 1, False))
    return reached


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildContext:
    """The directory `root` of a build context, and `own`, the directory of the container file.

    Both are resolved.

    `named` is True if the user chose `root`. `project` is the directory with imagefactory.toml, to which
    paths in a recipe are relative; None if there will be no recipe. `reserved` are the names in it that
    imagefactory uses.
    """

    root: Path
    own: Path
    named: bool = False
    project: Path | None = None
    reserved: tuple[str, ...] = ()
    rules: IgnoreRules = IgnoreRules()

    def kind(self, path: str) -> EntryType:
        """Return the type of the entry at a path, ignoring .dockerignore. Empty if it does not exist."""
        return _entry_type(self.root, path)

    def link_fault(self, path: str) -> str:
        """Return why a link cannot be in `files` of a recipe.

        Empty for other entries and links inside the project.
        """
        resolved_path = self.root / path
        if not resolved_path.is_symlink():
            return ""
        if self.kind(path) != "file":
            return f"{show(path)} is a link to a directory, out of the build context or to nothing"
        within = self.project is None or resolved_path.resolve().is_relative_to(self.project)
        return "" if within else f"{show(path)} is a link out of the project"

    def read(self, path: str) -> str | None:
        """Return the text of a file of the context, None if COPY would not copy it."""
        resolved_path = normpath(path)
        if self.rules.excludes(resolved_path) or self.kind(resolved_path) != "file":
            return None
        return _read(self.root / resolved_path)

    def expand(self, source: str) -> list[str]:
        """Return the sorted paths that match a source of COPY. A path without a glob is returned as it is."""
        resolved_path = normpath(source)
        if not re.search(r"[*?\[]", resolved_path):
            return [resolved_path]
        paths = ["."]
        looks = 0
        for part in resolved_path.split("/"):
            after = []
            for directory in paths:
                for name in self.names(directory):
                    looks += 1
                    if looks > _MOST_ENTRIES:
                        return []
                    if fnmatchcase(name, part.replace("[^", "[!")):
                        after.append(normpath(f"{directory}/{name}"))
            paths = after
        return paths

    def names(self, directory: str) -> list[str]:
        """Return the sorted names in a directory of the context, none if it is not a directory."""
        if self.kind(directory) != "folder":
            return []
        try:
            with os.scandir(self.root / directory) as entries:
                return sorted(entry.name for _, entry in zip(range(_MOST_ENTRIES), entries, strict=False))
        except OSError:
            return []

    def project_path(self, path: str) -> str | None:
        """Return a path of the context relative to the project's root, None if it is outside."""
        if self.project is None:
            return None
        resolved_path = Path(normpath(self.root / path))
        return (
            resolved_path.relative_to(self.project).as_posix()
            if resolved_path.is_relative_to(self.project)
            else None
        )

    def others(self) -> Iterator[Path]:
        """Yield other possible contexts: the directory of the file and its parents up to the git root."""
        top = git_root(self.own)
        chain = [self.own, *self.own.parents]
        for number, directory in enumerate(chain):
            if directory != self.root and directory != directory.parent:
                yield directory
            if directory == top or (top is None and number >= _PARENTS):
                return

    def holds_all(self, directory: Path, groups: Sequence[Sequence[str]]) -> bool:
        """Return whether another directory contains one path of each group."""
        other = open_context(self.own, selection=directory, project=self.project)
        return all(any(_path_exists(other, path) for path in group) for group in groups)


def _path_exists(context: BuildContext, path: str) -> bool:
    names = (name for name in context.expand(path) if not context.rules.excludes(name))
    return any(context.kind(name) in ("file", "folder") for name in names)


def open_context(
    project_root: Path,
    *,
    selection: Path | None = None,
    project: Path | None = None,
    reserved: Sequence[str] = (),
    file: str = "",
) -> BuildContext:
    """Return the build context of a file in `project_root`: `selection`, or the root of its git work tree.

    `file` is the name of the container file: Docker prefers `NAME.dockerignore` next to it. Raises
    UsageError.
    """
    project_root = project_root.resolve()
    if selection is not None and not selection.is_dir():
        raise UsageError(
            "option-invalid",
            f"{selection} is not a directory",
            hint="pass the directory that COPY reads with --context DIR",
        )
    root = selection.resolve() if selection is not None else git_root(project_root) or project_root
    ignore_path = project_root / f"{file}.dockerignore"
    names = [ignore_path.relative_to(root).as_posix()] if file and ignore_path.is_relative_to(root) else []
    rules = IgnoreRules()
    for name in [*names, ".dockerignore"]:
        text = _read(root / name) if _entry_type(root, name) == "file" else None
        if text is not None:
            rules = parse_ignore_rules(text, name)
            break
    return BuildContext(
        root=root,
        own=project_root,
        named=selection is not None,
        project=project.resolve() if project is not None else None,
        reserved=tuple(reserved),
        rules=rules,
    )


def git_root(directory: Path) -> Path | None:
    """Return the root of a directory's git work tree: the nearest parent that contains `.git`."""
    return next((parent for parent in (directory, *directory.parents) if (parent / ".git").exists()), None)


def context_option(directory: Path) -> str:
    """Return `--context DIR` for the current directory, quoted for a shell."""
    written = os.path.relpath(directory)
    return f"--context {shlex.quote(str(directory) if written.startswith('../..') else written)}"


def _entry_type(root: Path, path: str) -> EntryType:
    try:
        resolved_path = (root / path).resolve()
        if not resolved_path.is_relative_to(root):
            return "outside"
        return "folder" if resolved_path.is_dir() else "file" if resolved_path.is_file() else ""
    except (OSError, RuntimeError, ValueError):  # a circle of links, a name that is too long or holds \0
        return ""


def _read(path: Path) -> str | None:
    """Return the text of a file, None if it is too large, not UTF-8 or not readable."""
    try:
        with path.open("rb") as stream:
            data = stream.read(MOST_BYTES + 1)
        return decode_text(data) if len(data) <= MOST_BYTES else None
    except (OSError, ValueError):
        return None


def context_message(context: BuildContext) -> str:
    """Return the note that names the build context."""
    message = f"the build context is {show(str(context.root), limit=200)}"
    return message if context.named else f"{message} ({context_option(context.own)} takes another)"


def decode_text(data: bytes) -> str:
    """Decode the text of a user's file like pip.

    The encoding is that of the byte order mark, or of a comment `coding: NAME` in the first two lines, or
    else UTF-8. Raises ValueError whose message continues a sentence.
    """
    for mark, encoding in _MARKS:
        if data.startswith(mark):
            return _decode(data, encoding)
    if b"\x00" in data:
        zeros = data[:1000].count(0) * 5 > len(data[:1000])
        raise ValueError(
            "is UTF-16 without a byte order mark" if zeros else "contains zero bytes, so it is not text"
        )
    for line in data.split(b"\n", 2)[:2]:
        match = _CODING.search(line) if line.startswith(b"#") else None
        if match and _PLAIN_ENCODING.match(match[1]):
            return _decode(data, match[1].decode())
    return _decode(data, "utf-8")


def _decode(data: bytes, encoding: str) -> str:
    try:
        return data.decode(encoding).removeprefix("\ufeff")
    except (LookupError, UnicodeDecodeError):
        raise ValueError(f"is not {encoding.upper()[:40]}") from None
