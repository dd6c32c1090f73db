"""What a machine must have to make bases: mmdebstrap, a user namespace, and ids that are of no user."""

from __future__ import annotations

import os
import pwd
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from imagefactory.errors import ToolError
from imagefactory.runtime.build_sandbox import SYSTEM_PATH, IdMaps

IDS = 65536
"""As many ids as Debian's packages may use."""
LAST_ID = 0x6FFFFFFF
"""The last id that systemd sets apart for containers (its UIDS-GIDS.md): no user of the machine has it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BuilderFacts:
    """What decides whether this machine can make bases. `mmdebstrap` is its version, empty without it.

    `uid_map` and `gid_map` are those of this process, `subuid` and `subgid` the texts of the files in /etc.
    `names` are the user's name and number, as those files may name it.
    """

    is_root: bool
    mmdebstrap: str
    has_newuidmap: bool
    names: tuple[str, ...]
    uid_map: str
    gid_map: str
    subuid: str
    subgid: str


def choose_ids(facts: BuilderFacts) -> IdMaps:
    """The ids that become 0 to 65535 in a build. Raises ToolError for the first thing that is missing."""
    sudo = "" if facts.is_root else "sudo "
    if not facts.mmdebstrap:
        raise ToolError(
            "tool-missing",
            "mmdebstrap is not installed",
            hint=f"{sudo}apt-get install mmdebstrap{'' if facts.is_root else ' uidmap'}",
        )
    if facts.is_root:
        uid, gid = unused_ids(facts.uid_map), unused_ids(facts.gid_map)
        if uid is None or gid is None:
            raise ToolError(
                "subordinate-ids-missing",
                f"root has no {IDS} ids here besides its own, and bases are never built with root's ids",
                hint="build outside of this container, or give it two ranges of 65536 ids",
            )
        return IdMaps(uid_map=f"0 {uid} {IDS}", gid_map=f"0 {gid} {IDS}", delegated=False)
    if not facts.has_newuidmap:
        raise ToolError(
            "tool-missing",
            "newuidmap is not installed, and users other than root need it to build bases",
            hint="sudo apt-get install uidmap",
        )
    uid, gid = delegated_ids(facts.subuid, facts.names), delegated_ids(facts.subgid, facts.names)
    if uid is None or gid is None:
        raise ToolError(
            "subordinate-ids-missing",
            f"user '{facts.names[0]}' has no {IDS} subordinate ids in /etc/subuid and /etc/subgid",
            hint=f"sudo usermod --add-subuids 100000-165535 --add-subgids 100000-165535 {facts.names[0]} "
            "(choose a range that no other line of these files has)",
        )
    return IdMaps(uid_map=f"0 {uid} {IDS}", gid_map=f"0 {gid} {IDS}", delegated=True)


def unused_ids(id_map: str) -> int | None:
    """The first of 65536 ids for root to build with: the highest of its namespace, up to LAST_ID."""
    found = []
    for line in id_map.splitlines():
        first, _, count = map(int, line.split())
        start = min(first + count, LAST_ID + 1) - IDS
        if start >= max(first, 1):
            found.append(start)
    return max(found, default=None)


def delegated_ids(text: str, names: Sequence[str]) -> int | None:
    """The first of 65536 ids that a subuid(5) or subgid(5) file gives one of `names`, None without them."""
    for line in text.splitlines():
        match = re.fullmatch(r"([^:]+):([0-9]+):([0-9]+)", line.strip())
        if match and match[1] in names and int(match[2]) and int(match[3]) >= IDS:
            return int(match[2])
    return None


def builder_facts() -> BuilderFacts:
    """Read what this machine has; starts one short process, changes nothing."""
    try:
        user = pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        user = str(os.geteuid())
    return BuilderFacts(
        is_root=os.geteuid() == 0,
        mmdebstrap=_output(["mmdebstrap", "--version"]).removeprefix("mmdebstrap "),
        has_newuidmap=all(shutil.which(tool, path=SYSTEM_PATH) for tool in ("newuidmap", "newgidmap")),
        names=(user, str(os.geteuid())),
        uid_map=_text(Path("/proc/self/uid_map")),
        gid_map=_text(Path("/proc/self/gid_map")),
        subuid=_text(Path("/etc/subuid")),
        subgid=_text(Path("/etc/subgid")),
    )


def _output(argv: Sequence[str]) -> str:
    try:
        done = subprocess.run(
            argv,
            env={"PATH": SYSTEM_PATH, "LC_ALL": "C.UTF-8"},
            capture_output=True,
            text=True,
            check=False,
            stdin=subprocess.DEVNULL,
        )
    except FileNotFoundError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""
