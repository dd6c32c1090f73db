"""A git work tree that a test fills."""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

WHO = ("-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "commit.gpgSign=false")


@dataclass(frozen=True, slots=True)
class GitTree:
    """The folder of a new repository; called with a command of git it returns what git prints."""

    folder: Path

    def __post_init__(self) -> None:
        self("init", "--quiet")

    def __call__(self, *arguments: str) -> str:
        environ = {**os.environ, "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}
        done = subprocess.run(
            ("git", "-C", str(self.folder), *WHO, *arguments), check=True, capture_output=True, env=environ
        )
        return done.stdout.decode().strip()

    def commit(self) -> None:
        """Commit all files; without a change the commit is empty."""
        self("add", "-A")
        self("commit", "--quiet", "--allow-empty", "-m", "a")
