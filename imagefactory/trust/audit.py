"""The audit log: signatures, approvals, promotions and other events. Lines are only appended.

    <store>/journal/audit.jsonl     {"time", "user", "host", "action", "what", "where", "key", "why"}

The log shows the staff of a site which user did what from this store. It is not evidence, because the owner
of the store can edit it.
"""

from __future__ import annotations

import fcntl
import json
import os
import platform
import pwd
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import BinaryIO

from imagefactory.fs import explain_full_disk
from imagefactory.oci.manifests import canonical_json
from imagefactory.serialize import format_time, printable_line

NAME = "audit.jsonl"
SIGN, REVOKE, APPROVE = "sign", "revoke", "approve"
PROMOTE, PUBLISH, ROLLBACK = "promote", "publish", "rollback"


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditEntry:
    """One event.

    `what` is the name of its object, `where` a repository or a file, `key` the id of a key or empty.
    """

    action: str
    what: str
    where: str = ""
    key: str = ""
    why: str = ""


def append_audit(store: Path, entries: Iterable[AuditEntry], now: datetime) -> None:
    """Append a line for each entry and flush the file to the disk.

    Raises OSError, and StoreError if the disk is full.
    """
    who = {"time": format_time(now.astimezone(UTC).replace(microsecond=0)), **_actor()}
    lines = [
        canonical_json(
            {
                **who,
                "action": event.action,
                "what": printable_line(event.what),
                "where": printable_line(event.where),
                "key": event.key,
                "why": printable_line(event.why),
            }
        )
        for event in entries
    ]
    if not lines:
        return
    path = store / "journal" / NAME
    with explain_full_disk(store):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
        with os.fdopen(handle, "r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            append_lines(file, lines)


def append_lines(file: BinaryIO, lines: Iterable[bytes]) -> None:
    """Append lines to a log and flush it to the disk. If the last line is incomplete, end it first."""
    if file.seek(0, os.SEEK_END):
        file.seek(-1, os.SEEK_END)
        if file.read(1) != b"\n":
            file.write(b"\n")
    file.writelines(line + b"\n" for line in lines)
    file.flush()
    os.fsync(file.fileno())


def read_audit(store: Path) -> Iterator[Mapping[str, str]]:
    """Yield the entries, the oldest first. Incomplete lines are skipped."""
    try:
        lines = (store / "journal" / NAME).read_bytes().splitlines()
    except FileNotFoundError:
        return
    for line in lines:
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict):
            yield {str(name): str(value) for name, value in row.items()}


def _actor() -> dict[str, str]:
    try:
        user = pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        user = str(os.getuid())
    return {"user": user, "host": platform.node()}
