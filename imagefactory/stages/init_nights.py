"""The nightly build of a project in GitHub Actions or GitLab CI: the files that `init` writes for it."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from imagefactory import __version__
from imagefactory.errors import DISTRIBUTION, UsageError
from imagefactory.lock.git import ask_git
from imagefactory.settings.load import SHIPPED

NIGHTS = {
    "github": {
        ".github/workflows/nightly.yml": "nightly.yml",
        ".github/workflows/promote.yml": "promote.yml",
        ".github/workflows/README.md": "github.md",
        ".github/runner_hook.sh": "runner_hook.sh",
    },
    "gitlab": {".gitlab-ci.yml": "gitlab-ci.yml", ".gitlab/README.md": "gitlab.md"},
}
"""Where each file goes in a project, and its name in `shipped/nights`."""
SOURCE = "source.json"
"""The file of the package in which release.yml records the repository and the commit of a release."""
_OWN = re.compile(r"\$/(\.github/workflows/[a-z]+\.yml)")
"""How imagefactory's own callers name its reusable workflows: in the same repository, at the same commit."""
_ADDRESS = re.compile(
    r"(?:(?P<web>https?://)|ssh://|(?=[^@/\s]+@))(?:[^@/\s]+@)?"
    r"(?P<host>\w[\w.-]*)(?P<port>:\d+)?[:/](?P<path>\w[\w.-]*(?:/\w[\w.-]*)+)"
)
"""An address of a repository, as git has it: for the web, for ssh, or USER@HOST:PATH."""
_COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """The repository of this imagefactory, by an address that begins with https://, and its commit."""

    url: str
    commit: str


def night_files(services: Iterable[str], root: Path) -> dict[str, str]:
    """Return the text of each file of NIGHTS by its path below `root`, pinned to this imagefactory's commit.

    Raises UsageError where that commit is not known, or where `root` is a folder within a repository.
    """
    wanted = [row for service in services for row in NIGHTS[service].items()]
    if not wanted:
        return {}
    above = next(
        (one for one in (root.absolute(), *root.absolute().parents) if (one / ".git").exists()), root
    )
    if above not in (root, root.absolute()):
        raise UsageError(
            "not-repository-root",
            f"{root} is in the repository {above}: a nightly build must be in its top directory",
            hint=f"make it a repository of its own: git init {shlex.quote(str(root))}",
        )
    source = find_source(SHIPPED.parent)
    return {path: _pin((SHIPPED / "nights" / name).read_text("utf-8"), source) for path, name in wanted}


def _pin(text: str, source: Source) -> str:
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


def find_source(package: Path) -> Source:
    """Return where `package` comes from: a release, a clone, or a repository that pip installed.

    Raises UsageError where no commit is known, or where a clone has one that no branch of its origin has.
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


def _source_of_clone(clone: Path) -> Source:
    source = _read_source(_git(clone, "remote", "get-url", "origin"), _git(clone, "rev-parse", "HEAD"))
    if not _git(clone, "for-each-ref", "--contains", source.commit, "refs/remotes/origin"):
        raise UsageError(
            "commit-not-pushed",
            f"{clone} is at commit {source.commit[:12]}, which is in no branch of {source.url}",
            hint="push the commit, or check out a pushed one",
        )
    return source


def _read_source(url: str, commit: str) -> Source:
    found = _ADDRESS.fullmatch(url.removesuffix("/").removesuffix(".git"))
    if not (found and _COMMIT.fullmatch(commit)):
        raise UsageError(
            "commit-unknown",
            "a nightly build is pinned to a commit of imagefactory, and the commit of this one is not known",
            hint=f"install a release of {DISTRIBUTION}, or pip install git+https://github.com/OWNER/NAME@COMMIT",
        )
    port = found["port"] or "" if found["web"] else ""
    return Source(url=f"https://{found['host']}{port}/{found['path']}", commit=commit)


def _git(clone: Path, *words: str) -> str:
    printed = ask_git(clone, *words, options=("-c", "safe.directory=*"))
    return printed.decode("utf-8", "replace").strip()
