"""Convolutions by one correlation alone: for frameworks that have no other, and derive nothing themselves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .. import reference

Correlate = Callable[[Any, Any, int], Any]


def convolve(case: reference.ConvolutionCase, correlate: Correlate) -> dict[str, Any]:
    """`forward`, and the gradients for `image` and `filters`, of `correlate(image, filters, stride)`.

    The image's correlates what comes from above, spread by the stride, with the filters turned around; the
    filters' the image with the same, images and channels exchanged. `correlate` adds nothing at the edges.
    """
    numpy, kept, swap = reference.numpy, case.padding, (1, 0, 2, 3)
    image = numpy.pad(case.image, ((0, 0), (0, 0), (kept, kept), (kept, kept)))
    images, count, rows, columns = case.outer.shape
    step, reach = case.stride, case.filters.shape[2]
    spread = numpy.zeros((images, count, (rows - 1) * step + 1, (columns - 1) * step + 1))
    spread[:, :, ::step, ::step] = case.outer
    edge = reach - 1 - kept
    above = numpy.pad(spread, ((0, 0), (0, 0), (edge, edge), (edge, edge)))
    turned = case.filters.transpose(swap)[:, :, ::-1, ::-1]
    return {
        "forward": correlate(image, case.filters, step),
        "image": correlate(above, turned, 1),
        "filters": correlate(image.transpose(swap), spread.transpose(swap), 1).transpose(swap),
    }
