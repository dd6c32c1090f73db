"""The hash of all inputs of a target's solution. A lock with another hash is outdated."""

from __future__ import annotations

import hashlib
import json

from imagefactory.model import BaseSpec, Lock, Target

FORMAT = 1
"""The format of lock files, of wheels and of conda packages."""


def content_hash(target: Target, base: BaseSpec, parent_lock: Lock | None) -> str:
    """Return `sha256:...` of all inputs of a target's solution. A lock with another hash is outdated.

    `parent_lock` is the lock of the parent target. Excluded: name, description, checks and environment (they
    change no package), the written order of requirements, and the versions of the solvers (a newer solver
    must not make every lock outdated).
    """
    conda = target.conda
    decides: dict[str, object] = {
        "format": FORMAT,
        "source": target.source,
        "requirements": sorted(set(target.requirements)),
        "constraints": sorted(set(target.constraints)),
        "python": target.python,
        "platform": target.platform,
        # For conda packages it is in `system`, whatever their base.
        "glibc": "" if conda else base.glibc,
    }
    if conda or parent_lock:
        decides |= {
            "pip": sorted(set(target.pip)),
            "channels": list(target.channels),
            "priority": target.priority,
            "system": sorted(target.virtual),
            "under": sorted([p.filename, p.sha256] for p in parent_lock.packages) if parent_lock else [],
        }
    if target.origins:
        decides["origins"] = [list(pair) for pair in target.origins]
    if target.sources:
        decides["sources"] = sorted(target.sources)
    if target.exclude:
        decides["exclude"] = sorted(target.exclude)
    if target.cooldown:
        decides["cooldown"] = target.cooldown
    canonical = json.dumps(decides, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return "sha256:" + hashlib.sha256(canonical.encode()).hexdigest()
