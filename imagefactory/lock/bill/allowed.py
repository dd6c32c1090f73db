"""Which licences stand in a bill, and which packages are not allowed by a list. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from imagefactory.lock.bill.licences import LICENSING
from imagefactory.extras.sbom.bill import Bill, Component, Licence

UNKNOWN = "NOASSERTION"


@dataclass(frozen=True, slots=True, kw_only=True)
class LicenceCheck:
    """`counted` are the licences, the packages of each and whether it is allowed, the most frequent first.

    `refused` are packages with those of their licences that are not allowed, `unknown` those without any,
    which may be `accepted`.
    """

    counted: tuple[tuple[Licence, int, bool], ...]
    refused: tuple[tuple[Component, tuple[Licence, ...]], ...]
    unknown: tuple[Component, ...]
    accepted: bool

    @property
    def holds(self) -> bool:
        return not self.refused and (self.accepted or not self.unknown)


def check_licences(bill: Bill, allowed: Collection[str]) -> LicenceCheck:
    """All licences of a package must be allowed, since it names them together.

    `allowed` are identifiers and names with `*` and `?`, in any case. Of an expression, one side of OR is
    enough, AND needs both, and `X WITH Y` is one licence. Packages that say none are accepted by the word
    NOASSERTION alone.
    """
    counts = Counter(licence for one in bill.components for licence in one.licences)
    fits = {licence: is_allowed(licence, allowed) for licence in counts}
    refused = (
        (one, tuple(licence for licence in one.licences if not fits[licence])) for one in bill.components
    )
    order = sorted(counts, key=lambda licence: (-counts[licence], licence))
    return LicenceCheck(
        counted=tuple((licence, counts[licence], fits[licence]) for licence in order),
        refused=tuple((one, wrong) for one, wrong in refused if wrong),
        unknown=tuple(one for one in bill.components if not one.licences),
        accepted=UNKNOWN in (one.upper() for one in allowed),
    )


def is_allowed(licence: Licence, allowed: Collection[str]) -> bool:
    patterns = [one.lower() for one in allowed]

    def named(text: str) -> bool:
        return any(fnmatchcase(text.lower(), pattern) for pattern in patterns)

    def holds(node: Any) -> bool:
        if isinstance(node, LICENSING.AND):
            return all(map(holds, node.args))
        if isinstance(node, LICENSING.OR):
            return any(map(holds, node.args))
        return named(node.render())

    return holds(LICENSING.parse(licence.text)) if licence.spdx else named(licence.text)
