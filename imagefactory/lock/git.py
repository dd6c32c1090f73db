"""Run git on untrusted repositories, without the programs that their `.git/config` names."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path

from packaging.version import InvalidVersion, Version

_SETTINGS = tuple(
    word for setting in ("log.showSignature=false", "core.fsmonitor=false") for word in ("-c", setting)
)
_NO_TRANSPORT = {"GIT_ALLOW_PROTOCOL": "none"}
"""The setting of git that allows no protocol.

A partial clone fetches missing objects with a program in its configuration, which cannot allow a protocol
that this variable omits. (Its `protocol.NAME.allow` outweighs `-c protocol.allow`.)
"""
SECONDS = 60


def git_output(directory: Path, *arguments: str, stdin: bytes = b"", options: tuple[str, ...] = ()) -> bytes:
    """Return the output of git in the repository of `directory`, empty if git fails or is missing.

    `arguments` must only read objects and references: a command that reads the work tree would run the
    filters of the repository's configuration.
    """
    try:
        result = subprocess.run(
            ["git", *options, *_SETTINGS, "-C", str(directory), *arguments],
            input=stdin,
            capture_output=True,
            timeout=SECONDS,
            check=False,
            env={**os.environ, **_NO_TRANSPORT},
        )
    except (OSError, subprocess.TimeoutExpired):
        return b""
    return result.stdout if result.returncode == 0 else b""


# A build gets the files without the repository. So the version is read here, where no program of the
# repository runs, and passed by the variable that the build tool documents for that.


VARIABLES: Mapping[str, str] = {
    **dict.fromkeys(("setuptools-scm", "hatch-vcs", "flit-scm"), "SETUPTOOLS_SCM_PRETEND_VERSION"),
    "pdm-backend": "PDM_BUILD_SCM_VERSION",
    "poetry-dynamic-versioning": "POETRY_DYNAMIC_VERSIONING_BYPASS",
    "uv-dynamic-versioning": "UV_DYNAMIC_VERSIONING_BYPASS",
}
"""Build requirements that read a version from git, and the variable that sets the version instead."""
_DIGITS = 9  # of a commit, so that the size of a clone does not change a version
_RELEASE_TAGS = "*[0-9]*"


class NoGitVersionError(Exception):
    """A directory has no version in git. The text is the reason."""


def git_version(directory: Path) -> str:
    """Return the version of a directory's commit: 1.2.3, or 1.2.4.dev5+g0123abcd five commits later.

    Changes that are not committed are ignored. Raises NoGitVersionError.
    """
    commit = _tag_parts(directory, "rev-parse", "--verify", "--quiet", "HEAD^{commit}")
    if not commit:
        raise NoGitVersionError("the directory is not in a git repository with a commit")
    described = _tag_parts(
        directory, "describe", "--tags", "--long", f"--abbrev={len(commit)}", "--match", _RELEASE_TAGS, "HEAD"
    )
    if described:
        tag, distance, _ = described.rsplit("-", 2)
        last = _version_of(tag)
    elif _tag_parts(directory, "rev-parse", "--is-shallow-repository") == "true":
        raise NoGitVersionError("the git repository is a shallow clone without a tag")
    else:
        last, distance = Version("0.0"), _tag_parts(directory, "rev-list", "--count", "HEAD")
    if distance == "0":
        return str(last)
    return f"{_next(last)}.dev{int(distance)}+g{commit[:_DIGITS]}"


def _tag_parts(directory: Path, *arguments: str) -> str:
    return git_output(directory, *arguments).decode("utf-8", "replace").strip()


def _version_of(tag: str) -> Version:
    """Return the version in a tag such as v1.2 or release-1.2. Raises NoGitVersionError."""
    for match in re.finditer(r"(?:^|[-_/])(?:[vV]\.?)?(?=[0-9])", tag):
        try:
            return Version(tag[match.end() :].partition("+")[0])
        except InvalidVersion:
            continue
    raise NoGitVersionError(f"the last git tag, {tag!r}, is not a version")


def _next(last: Version) -> str:
    """Return the version after a release: its last number plus one."""
    public = last.public.partition(".dev")[0]
    return re.sub(r"[0-9]+$", lambda match: str(int(match[0]) + 1), public)
