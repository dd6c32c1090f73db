"""What a machine must have to make bases: mmdebstrap, namespaces, and subordinate ids for ordinary users."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from imagefactory.errors import ToolError
from imagefactory.lock.debian.sources import search_path

ROOT_NAMESPACES = ("unshare", "--mount", "--pid", "--fork", "--mount-proc")


@dataclass(frozen=True, slots=True, kw_only=True)
class BuilderFacts:
    """What decides whether this machine can make bases. `mmdebstrap` is its version, empty without it."""

    is_root: bool
    mmdebstrap: str
    has_newuidmap: bool
    has_subordinate_ids: bool
    namespaces: bool
    user: str


def require_mmdebstrap(environ: Mapping[str, str]) -> str:
    """mmdebstrap's version. Raises ToolError with the command that mends what is missing."""
    facts = builder_facts(environ)
    check_builder(facts)
    return facts.mmdebstrap


def check_builder(facts: BuilderFacts) -> None:
    """Raises ToolError for the first thing that keeps this machine from making bases."""
    sudo = "" if facts.is_root else "sudo "
    if not facts.mmdebstrap:
        raise ToolError(
            "mmdebstrap is not on this machine",
            hint=f"{sudo}apt-get install mmdebstrap{'' if facts.is_root else ' uidmap'}",
        )
    if facts.is_root:
        if not facts.namespaces:
            raise ToolError(
                "this machine denies root the mount and pid namespaces that bases are made in",
                hint="run on the machine itself, or give the container the capability SYS_ADMIN",
            )
        return
    if not facts.has_newuidmap:
        raise ToolError("an ordinary user needs newuidmap to make bases", hint="sudo apt-get install uidmap")
    if not facts.has_subordinate_ids:
        raise ToolError(
            f"user '{facts.user}' has no 65536 subordinate ids in /etc/subuid and /etc/subgid",
            hint=f"sudo usermod --add-subuids 100000-165535 --add-subgids 100000-165535 {facts.user} "
            "(choose a range that no other line of these files has)",
        )
    if not facts.namespaces:
        raise ToolError(
            "this machine denies user namespaces to ordinary programs",
            hint="sudo sysctl kernel.apparmor_restrict_unprivileged_userns=0 (Ubuntu) or "
            "kernel.unprivileged_userns_clone=1 (older Debian), or run with sudo",
        )


def builder_facts(environ: Mapping[str, str]) -> BuilderFacts:
    """Look at this machine; starts two short processes, changes nothing."""
    path = search_path(environ)
    is_root = os.geteuid() == 0
    try:
        user = pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        user = str(os.geteuid())
    tools = ("newuidmap", "newgidmap")
    probe = ROOT_NAMESPACES if is_root else ("unshare", "--user")
    return BuilderFacts(
        is_root=is_root,
        mmdebstrap=said_by(["mmdebstrap", "--version"], path).removeprefix("mmdebstrap "),
        has_newuidmap=all(shutil.which(tool, path=path) for tool in tools),
        has_subordinate_ids=all(
            has_range(_text(Path(file)), (user, str(os.geteuid()))) for file in ("/etc/subuid", "/etc/subgid")
        ),
        namespaces=said_by([*probe, "--", "echo", "yes"], path) == "yes",
        user=user,
    )


def has_range(text: str, names: Sequence[str]) -> bool:
    """Whether a subuid(5) or subgid(5) file gives one of `names` a range of 65536 ids."""
    fields = [line.split(":") for line in text.splitlines()]
    return any(
        len(field) == 3 and field[0] in names and field[2].isdigit() and int(field[2]) >= 65536
        for field in fields
    )


def said_by(argv: Sequence[str], path: str) -> str:
    try:
        done = subprocess.run(
            argv,
            env={"PATH": path, "LC_ALL": "C.UTF-8"},
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
