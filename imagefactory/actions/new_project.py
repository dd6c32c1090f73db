"""Create a project, empty or with bundled recipes and a nightly build. Add rows to its recipes."""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from imagefactory import __version__
from imagefactory.actions.definition import write_definition
from imagefactory.actions.lock import LockOptions, LockResult, lock_target
from imagefactory.errors import DISTRIBUTION, LockError, NothingSelectedError, UsageError, os_problem
from imagefactory.fs import replace_text
from imagefactory.lock.files import UNSOLVABLE, lock_names
from imagefactory.lock.git import git_output
from imagefactory.lock.layers import LAYERS
from imagefactory.model import Target
from imagefactory.progress import Progress
from imagefactory.project import Project, load_lenient, load_project, recipes_directory
from imagefactory.recipes.bases import BASES_FILE
from imagefactory.recipes.edit import RecipeAddition, add_row, check_draft
from imagefactory.recipes.expand import select_single
from imagefactory.recipes.read import read_bases, read_each, read_file
from imagefactory.recipes.recipe import parse_recipe
from imagefactory.settings.choices import SettingValue
from imagefactory.settings.files import FILE_NAME
from imagefactory.settings.load import SHIPPED, Settings
from imagefactory.versions import natural, nearest

SETTINGS = """\
# The settings of this project; this file marks its root. `imagefactory config` prints each setting, its value
# and its source. Write here what applies to everyone who works in this project, such as
# registry = "registry.example.org/images"
# Most settings apply only to users who ran `imagefactory config --trust` here since the last change.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class NewProject:
    """A new project. `families` are the copied ones with their parents, `written` file names below the root.

    `target` can be built at once: it is the newest target of the first requested family.
    """

    families: tuple[str, ...]
    written: tuple[str, ...]
    target: str = ""


def create_project(
    root: Path,
    requested: tuple[str, ...],
    settings: Settings,
    environ: Mapping[str, str],
    nights: Mapping[str, str] | None = None,
) -> NewProject:
    """Write the bases and the `requested` bundled families, with their parents.

    `nights` are further files, from `nightly_files`. Existing equal files stay. Raises NothingSelectedError
    for an unknown family, and UsageError, before anything is written, if a file exists with other content.
    """
    nights = nights or {}
    targets = shipped_targets(settings, environ)
    families = _with_parent_families(targets, requested)
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
                    f"{root / name} exists with other content, so nothing was written",
                    hint="rename the file, run the command again, and merge the two files"
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
            hint="choose a directory that you can write",
        ) from error
    newest = [target for target in targets if requested and target.family == requested[0]]
    newest.sort(key=lambda target: (natural(target.version), -len(target.name)))
    return NewProject(families=families, written=written, target=newest[-1].name if newest else "")


def remove_written(root: Path, project: NewProject) -> None:
    """Remove the files that `create_project` wrote, and the directories that are empty then."""
    for name in project.written:
        (root / name).unlink(missing_ok=True)
    for directory in sorted({(root / name).parent for name in project.written} - {root}, reverse=True):
        with suppress(OSError):  # it has other files
            directory.rmdir()


def shipped_targets(settings: Settings, environ: Mapping[str, str]) -> tuple[Target, ...]:
    """Return the bundled targets."""
    shipped = replace(settings, root=SettingValue(value=str(SHIPPED), origin="init"))
    return load_project(shipped, environ).targets


def find_shipped(name: str, settings: Settings, environ: Mapping[str, str]) -> Target | None:
    """Return the bundled target `name`, None if there is none or the project has a recipe of its family."""
    try:
        target = select_single(shipped_targets(settings, environ), name)
    except NothingSelectedError:
        return None
    return None if (settings.root_path / "recipes" / f"{target.family}.yaml").exists() else target


def _with_parent_families(targets: Iterable[Target], requested: Iterable[str]) -> tuple[str, ...]:
    """Return the `requested` families and their parents, sorted."""
    by_name = {target.name: target for target in targets}
    known = sorted({target.family for target in by_name.values()})
    selected: set[str] = set()
    waiting = list(requested)
    while waiting:
        family = waiting.pop()
        if family not in known:
            suggestion = nearest(family, known)
            raise NothingSelectedError(
                "family-unknown",
                f"imagefactory has no family '{family}'",
                hint=f"did you mean '{suggestion}'?"
                if suggestion
                else f"available families: {', '.join(known)}",
            )
        if family not in selected:
            selected.add(family)
            waiting += [by_name[t.on].family for t in by_name.values() if t.family == family and t.on]
    return tuple(sorted(selected))


def _always() -> list[str]:
    """Return the names of the files of every project."""
    recipes = SHIPPED / "recipes"
    paths = (recipes / BASES_FILE, *recipes.glob("*.schema.json"))
    locks = (SHIPPED / _base_lock(base.name) for base in read_bases(recipes))
    return [str(path.relative_to(SHIPPED)) for path in (*paths, *locks) if path.exists()]


def _base_lock(name: str) -> str:
    return f"lockfiles/bases/{name}.lock"


def _theirs(targets: Iterable[Target], families: tuple[str, ...], always: Sequence[str]) -> list[str]:
    """Return the file names of families, without the `always` written files."""
    names = [f"recipes/{family}.yaml" for family in families]
    for target in targets:
        if target.family in families:
            files = (
                *lock_names(target.name, conda=target.conda),
                *(f"{target.name}.{kind}" for kind in (UNSOLVABLE, LAYERS)),
            )
            names += [f"lockfiles/{name}" for name in files if (SHIPPED / "lockfiles" / name).exists()]
            base = _base_lock(target.base)  # specific: for its platform, or with packages of its recipe
            names += [base] if base not in always and (SHIPPED / base).exists() else []
    return names


# --- The nightly build of a project in GitHub Actions or GitLab CI: the files that `init` writes for it


NIGHTLY_FILES = {
    "github": {
        ".github/workflows/nightly.yml": "nightly.yml",
        ".github/workflows/promote.yml": "promote.yml",
        ".github/workflows/README.md": "github.md",
        ".github/runner_hook.sh": "runner_hook.sh",
    },
    "gitlab": {".gitlab-ci.yml": "gitlab-ci.yml", ".gitlab/README.md": "gitlab.md"},
}
"""The path of each file in a project, and its name in `shipped/nights`."""
SOURCE = "source.json"
"""The file of the package in which release.yml records the repository and the commit of a release."""
_OWN = re.compile(r"\$/(\.github/workflows/[a-z]+\.yml)")
"""A `$/...` path in imagefactory's own workflows: a reusable workflow of the same repository and commit."""
_ADDRESS = re.compile(
    r"(?:(?P<web>https?://)|ssh://|(?=[^@/\s]+@))(?:[^@/\s]+@)?"
    r"(?P<host>\w[\w.-]*)(?P<port>:\d+)?[:/](?P<path>\w[\w.-]*(?:/\w[\w.-]*)+)"
)
"""The address of a git repository: https, ssh, or USER@HOST:PATH."""
_COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ImagefactorySource:
    """The repository of this imagefactory, as an https:// address, and its commit."""

    url: str
    commit: str


def nightly_files(services: Iterable[str], root: Path) -> dict[str, str]:
    """Return the text of each nightly file by its path below `root`, pinned to this imagefactory's commit.

    Raises UsageError if the commit is unknown, or if `root` is a subdirectory of a repository.
    """
    rows = [row for service in services for row in NIGHTLY_FILES[service].items()]
    if not rows:
        return {}
    above = next(
        (
            directory
            for directory in (root.absolute(), *root.absolute().parents)
            if (directory / ".git").exists()
        ),
        root,
    )
    if above not in (root, root.absolute()):
        raise UsageError(
            "not-repository-root",
            f"{root} is in the repository {above}: a nightly build must be in its top directory",
            hint=f"create a repository for it: git init {shlex.quote(str(root))}",
        )
    source = find_source(SHIPPED.parent)
    return {path: _pin((SHIPPED / "nights" / name).read_text("utf-8"), source) for path, name in rows}


def _pin(text: str, source: ImagefactorySource) -> str:
    name = source.url.removeprefix("https://").partition("/")[2]
    if _OWN.search(text) and name.count("/") != 1:
        raise UsageError(
            "source-not-on-github",
            f"GitHub Actions cannot call the workflows of {source.url}",
            hint="install imagefactory from a GitHub repository: its path is OWNER/NAME",
        )
    text = _OWN.sub(rf"{name}/\1@{source.commit} # v{__version__}", text)
    for mark, value in (("@URL@", source.url), ("@COMMIT@", source.commit), ("@VERSION@", f"v{__version__}")):
        text = text.replace(mark, value)
    return text


def find_source(package: Path) -> ImagefactorySource:
    """Return the origin of `package`: a release, a clone, or a repository that pip installed.

    Raises UsageError if the commit is unknown, or no branch of a clone's origin has it.
    """
    if (package / SOURCE).exists():
        row = json.loads((package / SOURCE).read_text("utf-8"))
        return _read_source(row["url"], row["commit"])
    if (package.parent / ".git").exists():
        return _source_of_clone(package.parent)
    try:  # PEP 610
        row = json.loads(distribution(DISTRIBUTION).read_text("direct_url.json") or "{}")
    except PackageNotFoundError:
        row = {}
    return _read_source(row.get("url", ""), row.get("vcs_info", {}).get("commit_id", ""))


def _source_of_clone(clone: Path) -> ImagefactorySource:
    source = _read_source(_git(clone, "remote", "get-url", "origin"), _git(clone, "rev-parse", "HEAD"))
    if not _git(clone, "for-each-ref", "--contains", source.commit, "refs/remotes/origin"):
        raise UsageError(
            "commit-not-pushed",
            f"{clone} is at commit {source.commit[:12]}, which no branch of {source.url} has",
            hint="push the commit, or check out a commit that is pushed",
        )
    return source


def _read_source(url: str, commit: str) -> ImagefactorySource:
    match = _ADDRESS.fullmatch(url.removesuffix("/").removesuffix(".git"))
    if not (match and _COMMIT.fullmatch(commit)):
        raise UsageError(
            "commit-unknown",
            "a nightly build needs the commit of this imagefactory, which is unknown",
            hint=f"install a release of {DISTRIBUTION}, or pip install git+https://github.com/OWNER/NAME@COMMIT",
        )
    port = match["port"] or "" if match["web"] else ""
    return ImagefactorySource(url=f"https://{match['host']}{port}/{match['path']}", commit=commit)


def _git(clone: Path, *words: str) -> str:
    printed = git_output(clone, *words, options=("-c", "safe.directory=*"))
    return printed.decode("utf-8", "replace").strip()


# --- The stage from a framework's version to a row of its family's recipe, locked and rendered


@dataclass(frozen=True, slots=True, kw_only=True)
class RowAddition:
    """A row to write to the recipe at `path`, and the targets that it adds."""

    path: Path
    addition: RecipeAddition
    targets: tuple[Target, ...]


def plan_addition(project: Project, family: str, version: str, cuda: str) -> RowAddition:
    """Return the row of a family for a version. Raises UsageError, and RecipeError for an invalid row."""
    directory = recipes_directory(project.settings)
    recipes, faults = read_each(directory)
    known = [recipe.family for recipe in recipes]
    if family not in known and family not in faults:
        suggestion = nearest(family, known)
        raise NothingSelectedError(
            "family-unknown",
            f"this project has no family '{family}'",
            hint=f"did you mean '{suggestion}'?" if suggestion else f"imagefactory recipe new {family}",
        )
    path = directory / f"{family}.yaml"
    text, file = read_file(path)
    addition = add_row(text, parse_recipe(text, file), version, cuda)
    others = [recipe for recipe in recipes if recipe.family != family]
    drafted = check_draft(addition.text, family, others, project.bases)
    before = {target.name for target in project.targets}
    return RowAddition(
        path=path, addition=addition, targets=tuple(t for t in drafted if t.name not in before)
    )


def make_addition(
    project: Project, added: RowAddition, progress: Progress, tell: Callable[[LockResult], object]
) -> Iterator[str]:
    """Write the row, then lock and render its targets. Yields their names.

    The row stays if a target cannot be locked. Raises UsageError if the file cannot be written, and as
    `lock_target` does.
    """
    try:
        replace_text(added.path, added.addition.text)
    except OSError as error:
        raise UsageError(*os_problem("write", added.path, error), hint="check its permissions") from error
    whole = load_lenient(project.settings, project.environ, project.tell)
    for target in added.targets:
        try:
            tell(lock_target(whole, target, LockOptions(), progress))
        except LockError as error:
            error.hint += f"; the row is in {added.path}: correct it or delete it"
            raise
        write_definition(whole, target)
        yield target.name
