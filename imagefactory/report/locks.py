"""What locking moved, as a person reads it."""

from __future__ import annotations

from imagefactory.model import Lock, LockedConda, LockedPackage
from imagefactory.progress import format_bytes
from imagefactory.actions.lock import Relock


def format_relock(relock: Relock) -> str:
    """What moved: one line for an unchanged lock, else one line a package, and what is far behind."""
    return "\n".join([_moves(relock), *(f"  ! {behind}" for behind in relock.behind)])


def _moves(relock: Relock) -> str:
    before, after, name = relock.before, relock.after, relock.target.name
    if before is after or before == after:
        return f"{name}: unchanged ({len(after.packages)} packages)"
    old = {} if before is None else _by_name(before)
    new = _by_name(after)
    total = format_bytes(sum(package.size for package in after.packages))
    if before is None:
        return f"{name}: locked {len(new)} packages, {total}"
    lines = [f"{name}: {len(new)} packages, {total}"]
    for key in sorted(old.keys() | new.keys()):
        was, now = old.get(key), new.get(key)
        if was is None and now is not None:
            lines.append(f"  + {key[0]} {now.version}{_source(now)}")
        elif now is None and was is not None:
            lines.append(f"  - {key[0]} {was.version}{_source(was)}")
        elif was is not None and now is not None and was.sha256 != now.sha256:
            lines.append(f"  ~ {key[0]} {_moved(was, now)}")
    if len(lines) == 1:
        same = before.content_hash == after.content_hash
        lines.append(f"  the same packages{'' if same else ' for a changed recipe'}")
    if before.note != after.note:
        lines.append(f"  note: {after.note or 'none any more'}")
    return "\n".join(lines)


def _by_name(lock: Lock) -> dict[tuple[str, bool], LockedPackage]:
    """A package may stand there from conda before and from PyPI after, so the kind is a part of the key."""
    return {(package.name, isinstance(package, LockedConda)): package for package in lock.packages}


def _source(package: LockedPackage) -> str:
    return f" ({package.build})" if isinstance(package, LockedConda) else ""


def _moved(was: LockedPackage, now: LockedPackage) -> str:
    if was.version != now.version:
        return f"{was.version} -> {now.version}"
    if isinstance(was, LockedConda) and isinstance(now, LockedConda) and was.build != now.build:
        return f"{now.version}, {was.build} -> {now.build}"
    return f"{now.version}, new file"
