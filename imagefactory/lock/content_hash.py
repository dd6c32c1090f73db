"""What makes a lock stale: the hash of all that decides a target's solution."""

from __future__ import annotations

import hashlib
import json

from imagefactory.lock.conda.file import FORMAT as CONDA_FORMAT
from imagefactory.lock.pypi.requirements import FORMAT as WHEELS_FORMAT
from imagefactory.model import BaseSpec, Lock, Target


def content_hash(target: Target, base: BaseSpec, under: Lock | None) -> str:
    """`sha256:...` of all that decides a target's solution; a lock with another one is stale.

    `under` is the lock of the target that this one is built on. Not in it: name, description, checks and
    environment (they change no package), the order in which requirements are written, and the versions of
    the solvers (a newer one must not make every lock stale).
    """
    conda = target.conda
    decides: dict[str, object] = {
        "format": CONDA_FORMAT if conda else WHEELS_FORMAT,
        "source": target.source,
        "requirements": sorted(set(target.requirements)),
        "constraints": sorted(set(target.constraints)),
        "python": target.python,
        "platform": target.platform,
        # Of conda's packages `system` says it, whatever base they stand on.
        "glibc": "" if conda else base.glibc,
    }
    if conda or under:
        decides |= {
            "pip": sorted(set(target.pip)),
            "channels": list(target.channels),
            "priority": target.priority,
            "system": sorted(target.virtual),
            "under": sorted([one.filename, one.sha256] for one in under.packages) if under else [],
        }
    if target.origins:
        decides["origins"] = [list(pair) for pair in target.origins]
    if target.sources:
        decides["sources"] = sorted(target.sources)
    if target.exclude:
        decides["exclude"] = sorted(target.exclude)
    canonical = json.dumps(decides, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return "sha256:" + hashlib.sha256(canonical.encode()).hexdigest()
