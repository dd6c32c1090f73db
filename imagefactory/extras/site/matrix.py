"""The matrix: a row for each image, a column for each compute capability, a word in each cell. Pure."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass

from imagefactory.gpu.capability import Capability
from imagefactory.gpu.knowledge.amd_gpus import amd_gpus
from imagefactory.gpu.knowledge.gpus import gpus
from imagefactory.report.html.checks import GpuRun, runs_of
from imagefactory.report.html.words import Word, word_of
from imagefactory.extras.site.action import Reported
from imagefactory.extras.site.images import ReportImage
from imagefactory.trust.verdict import Standing
from imagefactory.versions import natural

_SAFE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,150}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownGpu:
    """A column: the capability, the first GPU of it and all that are known by name."""

    capability: Capability
    text: str
    first: str
    names: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class MatrixRow:
    """`day` is when the newest verdict was signed that can be relied on, in days since 1970; 0 for none."""

    image: ReportImage
    file: str
    words: tuple[Word, ...]
    runs: tuple[GpuRun, ...]
    day: int


def shown_gpus(report: Reported) -> tuple[ShownGpu, ...]:
    known = [(gpu.capability, gpu.name) for gpu in gpus()]
    known += [(gpu.processor, gpu.name) for gpu in amd_gpus()]
    found = []
    for capability in report.capabilities:
        names = tuple(name for of, name in known if of == capability)
        first = names[0] if names else ""
        found.append(ShownGpu(capability=capability, text=str(capability), first=first, names=names))
    return tuple(found)


def matrix_rows(report: Reported) -> tuple[MatrixRow, ...]:
    """By framework and family, numbers by their size; a column for each capability of the report."""
    order = sorted(
        report.images,
        key=lambda one: (
            *(one.framework, one.family),
            *(natural(one.version), natural(one.cuda), natural(one.target)),
        ),
    )
    return tuple(
        MatrixRow(
            image=image,
            file=file_name(image.target),
            words=words_of(image, report.capabilities),
            runs=runs_of(image),
            day=_newest_day(image),
        )
        for image in order
    )


def words_of(image: ReportImage, capabilities: Sequence[Capability]) -> tuple[Word, ...]:
    """A word for each capability; none at all of an image for CPUs alone."""
    if not image.gpu:
        return ()
    combos = {combo.capability: combo for combo in image.combos}
    return tuple(word_of(combos[one], image.predicted.get(one)) for one in capabilities)


def file_name(target: str) -> str:
    """The target's name; of one that is none, a hash of it."""
    return target if _SAFE.fullmatch(target) else f"image-{hashlib.sha256(target.encode()).hexdigest()[:16]}"


def _newest_day(image: ReportImage) -> int:
    days = [
        judged.verdict.issued.timestamp() // 86400
        for _, judged in image.history
        if judged.verdict and judged.standing is Standing.GOOD
    ]
    return int(max(days, default=0))
