"""Ranges of versions of which the same is said on one capability: combinations -> ranges. Pure.

A release that nobody tested ends a range, so that no range promises what no combination says.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from imagefactory.gpu import knowledge
from imagefactory.gpu.capability import Capability
from imagefactory.matrix.combos import Combo, ComboState, unite
from imagefactory.versions import natural


@dataclass(frozen=True, slots=True, kw_only=True)
class Range:
    """Versions of a framework without a gap of which the same is said on one capability.

    `cuda` are the CUDA versions of those combinations of the range that are in this state; which belongs to
    which version, the combinations say.
    """

    framework: str
    capability: Capability
    first: str
    last: str
    cuda: tuple[str, ...]
    state: ComboState

    @property
    def versions(self) -> str:
        """`2.1-2.3`, or one version."""
        return self.first if self.first == self.last else f"{self.first}-{self.last}"


def make_ranges(combos: Iterable[Combo]) -> tuple[Range, ...]:
    """Version ranges by framework and capability. Versions count as neighbours only if no release is between.

    A version is valid where it is with any CUDA, else in the state that leaves the most open.
    """
    groups = groupby(
        sorted(unite(combos), key=lambda one: (one.framework, one.capability, natural(one.version))),
        key=lambda one: (one.framework, one.capability),
    )
    return tuple(found for (_, _), some in groups for found in _ranges(list(some)))


_MOST_OPEN = (
    ComboState.VALID,
    ComboState.NOT_TESTED,
    ComboState.UNDECIDED,
    ComboState.RULED_OUT,
    ComboState.FAILED,
)


def _ranges(combos: Sequence[Combo]) -> Iterator[Range]:
    """Of one framework and capability; combos sorted by version."""
    framework, capability = combos[0].framework, combos[0].capability
    run: list[tuple[str, ComboState, tuple[str, ...]]] = []

    def close() -> Range:
        cuda = tuple(sorted({name for _, _, names in run for name in names}, key=natural))
        return Range(
            framework=framework,
            capability=capability,
            first=run[0][0],
            last=run[-1][0],
            cuda=cuda,
            state=run[0][1],
        )

    for version, some in groupby(combos, key=lambda one: one.version):
        alike = list(some)
        states = {one.state for one in alike}
        state = next(one for one in _MOST_OPEN if one in states)
        cuda = tuple(one.cuda for one in alike if one.state is state)
        if run and not (run[-1][1] is state and neighbours(framework, run[-1][0], version)):
            yield close()
            run = []
        run.append((version, state, cuda))
    if run:
        yield close()


def neighbours(framework: str, lower: str, upper: str) -> bool:
    """Whether no release is known between two versions; of those that are not known, numbers decide."""
    if minor_of(lower) == minor_of(upper):
        return True  # 2.3 and 2.3.1: patches of the same
    releases = knowledge.releases(knowledge.families().get(framework, framework))
    minors = {minor_of(one.version) for one in releases}
    if minor_of(lower) in minors and minor_of(upper) in minors:
        return not any(minor_of(lower) < one < minor_of(upper) for one in minors)
    (major, minor), (other, next_minor) = minor_of(lower), minor_of(upper)
    return major == other and next_minor == minor + 1


def minor_of(version: str) -> tuple[int, int]:
    """`(2, 3)` of `2.3.1`; what is not written counts as 0."""
    numbers = [int(one) for one in re.findall(r"[0-9]+", version, re.ASCII)[:2]]
    first, second, *_ = [*numbers, 0, 0]
    return first, second
