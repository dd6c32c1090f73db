"""The matrix as one picture: an SVG without script, light and dark by the reader's preference. Pure.

It names no time, so that the same images make the same bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from imagefactory.extras.site.matrix import MatrixRow, ShownGpu
from imagefactory.report.html.templating import fill
from imagefactory.report.html.words import GOOD, Word, count_words

NAME, COLUMN, CELL = 245, 66, 56
TOP, ROW, GROUP = 54, 24, 30
MARK = 165


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawnCell:
    word: Word
    x: int
    width: int = CELL


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawnLine:
    text: str
    x: int
    y: int
    cells: tuple[DrawnCell, ...] = ()
    bold: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawnMark:
    """A word of the legend."""

    word: Word
    x: int
    y: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawnHead:
    gpu: ShownGpu
    x: int


def format_picture(rows: Sequence[MatrixRow], gpus: Sequence[ShownGpu]) -> str:
    """The picture's text, without the images for CPUs alone; about 100 bytes a cell."""
    rows = [row for row in rows if row.image.gpu]
    width = max(NAME + COLUMN * len(gpus) + 12, 520)
    lines, y = _lines(rows)
    words = [word for row in rows for word in row.words]
    used = [word for word, count in count_words(words) if count]
    verified = sum(word.kind == GOOD for word in words)
    per_line = max((width - 16) // MARK, 1)
    marks = [
        DrawnMark(word=word, x=16 + number % per_line * MARK, y=y + 16 + number // per_line * 26)
        for number, word in enumerate(used)
    ]
    height = (marks[-1].y if marks else y) + 54
    return fill(
        "picture.svg",
        width=width,
        height=height,
        heads=[DrawnHead(gpu=gpu, x=NAME + COLUMN * i + CELL // 2) for i, gpu in enumerate(gpus)],
        lines=lines,
        marks=marks,
        says=f"{len(rows)} images on {len(gpus)} compute capabilities: "
        + ", ".join(f"{count} {word.word}" for word, count in count_words(words) if count),
        foot=f"imagefactory report: {verified} of {len(words)} verified. Filled: ran. Outlined: foretold.",
    )


def _lines(rows: Sequence[MatrixRow]) -> tuple[list[DrawnLine], int]:
    """The lines from the top down, and where they end."""
    lines, y, family = [], TOP, ""
    for row in rows:
        if row.image.family != family:
            family = row.image.family
            lines.append(DrawnLine(text=family, x=16, y=y + 6, bold=True))
            y += GROUP
        cells = tuple(DrawnCell(word=word, x=NAME + COLUMN * i) for i, word in enumerate(row.words))
        lines.append(DrawnLine(text=row.image.target, x=24, y=y, cells=cells))
        y += ROW
    return lines, y
