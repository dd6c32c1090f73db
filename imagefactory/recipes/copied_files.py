"""What COPY brings from the build context -> `files:` of a recipe, with paths from the project's root on."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from posixpath import basename, dirname, join

from imagefactory.extras.importers.build_context import BuildContext
from imagefactory.recipes.values import RULES
from imagefactory.recipes.yaml_tree import show

_MOST_ENTRIES = 20_000
_MOST_DEPTH = 40
_MOST_PATTERNS = 200
# Hidden files that may hold secrets, which an image would show to whoever has it.
_SECRETS = re.compile(
    r"\.(env|netrc|aws|ssh|pypirc|npmrc|docker|kube|gnupg|config|huggingface|wandb|credentials)\b|\.git-cred|.*_history$"
)
# Hidden files that say nothing to a program that runs.
_TOOLS = {
    *(".git", ".gitignore", ".gitattributes", ".gitmodules", ".github", ".gitlab-ci.yml", ".dockerignore"),
    *(".pre-commit-config.yaml", ".venv", ".vscode", ".idea", ".mypy_cache", ".ruff_cache", ".pytest_cache"),
    *(
        ".editorconfig",
        ".flake8",
        ".DS_Store",
        ".ipynb_checkpoints",
        ".circleci",
        ".style.yapf",
        ".coveragerc",
    ),
    *(".readthedocs.yaml", ".readthedocs.yml", ".python-version", ".clang-format", ".isort.cfg", ".cache"),
}


@dataclass(slots=True)
class OwnFiles:
    """`entries` are folders inside and the patterns of what goes there; `hidden` are files that stay out.

    `lost` are reasons why something of the source is in no entry.
    """

    entries: list[tuple[str, str]] = field(default_factory=list)
    hidden: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)


def find_own_files(context: BuildContext, source: str, to: str) -> OwnFiles:
    """The entries for one source: a file that becomes `to`, or a directory whose content lies in `to`."""
    found = OwnFiles()
    at = context.project_path(source)
    if at is None:
        found.lost.append("it is not in the imagefactory project")
    elif link := context.link_fault(source):
        found.lost.append(link)
    elif context.kind(source) == "file":
        _add(found, at, basename(to), dirname(to))
    else:
        walk = _Walk(context, found)
        whole, parts = walk.cover(source, 0)
        base = "" if at == "." else at
        if walk.looks > _MOST_ENTRIES or len(parts) + len(walk.named) > _MOST_PATTERNS:
            found.lost.append("it holds too much to be listed: exclude some of it in .dockerignore")
            return found
        if whole and base and parts:
            plain = to.endswith(f"/{base}")
            folder = to.removesuffix(f"/{base}") or "/"
            _keep(found, folder, base) if plain else _keep(found, to, f"{base}/./*")
            parts = []
        for part in (*parts, *walk.named):
            name = part if source == "." else part[len(source) + 1 :]
            _add(found, join(base, name), name, to)
    return found


def _add(found: OwnFiles, path: str, name: str, folder: str) -> None:
    """One file or directory at `path` of the project that lies as `name` in a folder inside."""
    if path == name:
        _keep(found, folder, path)
    elif not path.endswith(f"/{name}"):
        found.lost.append(f"it gets another name there: {show(name)}")
    elif join(folder, name).endswith(f"/{path}"):
        _keep(found, join(folder, name)[: -len(path) - 1] or "/", path)
    else:
        _keep(found, folder, f"{path[: -len(name) - 1]}/./{name}")


def _keep(found: OwnFiles, folder: str, pattern: str) -> None:
    plain = pattern.removesuffix("/./*")
    if not RULES["folder"].allows(folder):
        found.lost.append(f"own files cannot lie in {show(folder)}")
    elif not RULES["pattern"].allows(pattern) or any(char in plain for char in "*?["):
        found.lost.append(f"a recipe cannot name {show(pattern)}")
    elif (folder, pattern) not in found.entries:
        found.entries.append((folder, pattern))


class _Walk:
    """Looks through a directory of the context for what the fewest patterns name."""

    def __init__(self, context: BuildContext, found: OwnFiles) -> None:
        self.context, self.found = context, found
        self.looks = 0
        self.named: list[str] = []  # hidden files, which a pattern has to name
        self.keeps = any(rule.keeps for rule in context.rules.rules)

    def cover(self, folder: str, depth: int) -> tuple[bool, list[str]]:
        """Whether all that `files` takes of a directory is to be taken, and the paths that name it."""
        whole, parts = True, []
        for name in self.context.names(folder):
            path = name if folder == "." else f"{folder}/{name}"
            self.looks += 1
            if self.looks > _MOST_ENTRIES:
                return False, []
            if name == "__pycache__":
                continue
            kind, excluded = self.context.kind(path), bool(self.context.rules.excludes(path))
            link = "" if excluded else self.context.link_fault(path)
            if name.startswith("."):  # `files` leaves it out
                if name in _TOOLS or excluded:
                    continue
                if _SECRETS.match(name) or kind not in ("file", "folder") or self.context.link_fault(path):
                    self.found.hidden.append(path)
                else:
                    self.named.append(path)
            elif self.context.project_path(path) in self.context.reserved:
                whole = False
            elif link:
                whole = False
                self.found.lost.append(link)
            elif kind == "folder" and (not excluded or self.keeps) and depth < _MOST_DEPTH:
                inner_whole, inner = self.cover(path, depth + 1)
                whole &= inner_whole and not excluded
                parts += [path] if inner_whole and inner and not excluded else inner
            elif excluded:
                whole = False
            elif kind == "file":
                parts.append(path)
            else:  # a device, or too deep
                whole = False
                self.found.lost.append(f"{show(path)} is not a file that can be taken")
        return whole, parts
