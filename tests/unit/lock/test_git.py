"""The version that git gives a folder, and that a stranger's repository runs nothing for it."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from imagefactory.lock.git import NoGitVersionError, git_version
from tests.made.git_tree import GitTree


@pytest.fixture
def git(tmp_path: Path) -> GitTree:
    (tmp_path / "tree").mkdir()
    tree = GitTree(tmp_path / "tree")
    tree.commit()
    return tree


@pytest.mark.parametrize(
    ("tag", "there", "after"),
    [
        ("v1.2.3", "1.2.3", "1.2.4.dev1"),
        ("1.2", "1.2", "1.3.dev1"),
        ("release-2.0", "2.0", "2.1.dev1"),
        ("py/v0.9.9", "0.9.9", "0.9.10.dev1"),
        ("v1.0.0-rc1", "1.0.0rc1", "1.0.0rc2.dev1"),
        ("v3.1+cu121", "3.1", "3.2.dev1"),
    ],
)
def test_the_last_tag_counts_and_the_commits_since(git: GitTree, tag: str, there: str, after: str) -> None:
    git("tag", tag)
    git("tag", "latest")
    (git.folder / "changed").write_text("and not committed")
    assert git_version(git.folder) == there
    git.commit()
    assert git_version(git.folder) == f"{after}+g{git('rev-parse', 'HEAD')[:9]}"


def test_without_a_tag_the_commits_are_counted(git: GitTree) -> None:
    git.commit()
    (git.folder / "src").mkdir()
    assert git_version(git.folder / "src") == f"0.1.dev2+g{git('rev-parse', 'HEAD')[:9]}"


def test_what_has_no_version_is_said(git: GitTree, tmp_path: Path) -> None:
    with pytest.raises(NoGitVersionError, match="not in a git repository"):
        git_version(tmp_path)
    git.commit()
    address = f"file://{git.folder}"
    subprocess.run(["git", "clone", "-q", "--depth", "1", address, tmp_path / "short"], check=True)
    with pytest.raises(NoGitVersionError, match="shallow clone"):
        git_version(tmp_path / "short")
    git("tag", "r2-d2")
    with pytest.raises(NoGitVersionError, match="'r2-d2'"):
        git_version(git.folder)


def test_nothing_that_a_repository_names_is_run(git: GitTree, tmp_path: Path) -> None:
    ran, evil = tmp_path / "ran", tmp_path / "evil"
    evil.write_text(f"#!/bin/sh\ntouch {ran}\ncat\n")
    evil.chmod(0o755)
    (git.folder / ".gitattributes").write_text("* filter=evil diff=evil\n")
    git("tag", "v1.0")
    for name in ("filter.evil.clean", "filter.evil.process", "diff.evil.textconv", "diff.external"):
        git("config", name, str(evil))
    for name in ("core.fsmonitor", "core.pager", "core.sshCommand", "core.editor", "gpg.program"):
        git("config", name, str(evil))
    git("config", "core.hooksPath", str(tmp_path))
    for hook in ("post-index-change", "reference-transaction", "fsmonitor-watchman"):
        (tmp_path / hook).write_bytes(evil.read_bytes())
        (tmp_path / hook).chmod(0o755)
    subprocess.run(["git", "-C", git.folder, "status"], check=False, capture_output=True)
    assert ran.exists()  # so git itself would
    ran.unlink()
    assert git_version(git.folder) == "1.0"
    assert not ran.exists()
