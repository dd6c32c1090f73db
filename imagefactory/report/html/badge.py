"""A badge of one image: on which capabilities it is verified, as a small SVG. Pure."""

from __future__ import annotations

from imagefactory.matrix.combos import ComboState
from imagefactory.report.html.templating import fill
from imagefactory.extras.site.images import ReportImage

GREEN, RED, GREY = "#0b6e4f", "#b42318", "#5d6770"
_CHARACTER = 6.6  # units of a letter in 11 px Verdana, on the average


def format_badge(image: ReportImage) -> str:
    """`verified on sm_80, sm_90`; else that it failed where it was tried, was not tested, or is for CPUs."""
    right, colour = _said(image)
    left = image.target
    at = round(len(left) * _CHARACTER + 14)
    width = at + round(len(right) * _CHARACTER + 14)
    return fill("badge.svg", left=left, right=right, colour=colour, at=at, width=width)


def _said(image: ReportImage) -> tuple[str, str]:
    proven = [combo.capability.sm for combo in image.combos if combo.state is ComboState.VALID]
    if proven:
        return f"verified on {', '.join(proven)}", GREEN
    failed = [combo for combo in image.combos if combo.state is ComboState.FAILED]
    if failed:
        cause = str(failed[0].cause)
        where = ", ".join(combo.capability.sm for combo in failed if combo.cause == failed[0].cause)
        return f"{cause} on {where}", RED
    return "not tested" if image.gpu else "for CPUs", GREY
