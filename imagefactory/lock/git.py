"""git, asked about a repository that came from a stranger: nothing that its `.git/config` names is run."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

_SETTINGS = tuple(
    word for setting in ("log.showSignature=false", "core.fsmonitor=false") for word in ("-c", setting)
)
_NO_TRANSPORT = {"GIT_ALLOW_PROTOCOL": "none"}
"""A partial clone fetches what it lacks, by a program that its configuration names. The configuration cannot
allow a protocol that this variable does not list; its `protocol.NAME.allow` outweighs `-c protocol.allow`."""
SECONDS = 60


def ask_git(folder: Path, *arguments: str, given: bytes = b"", options: tuple[str, ...] = ()) -> bytes:
    """Return what git prints of the repository that `folder` is in, empty where it fails or is missing.

    `arguments` are of a command that reads objects and references alone: one that looks at the work tree
    would run the filters of the repository's configuration. `given` is for its stdin.
    """
    try:
        done = subprocess.run(
            ["git", *options, *_SETTINGS, "-C", str(folder), *arguments],
            input=given,
            capture_output=True,
            timeout=SECONDS,
            check=False,
            env={**os.environ, **_NO_TRANSPORT},
        )
    except (OSError, subprocess.TimeoutExpired):
        return b""
    return done.stdout if done.returncode == 0 else b""
