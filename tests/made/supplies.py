"""What engines are handed where everything is at hand already."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from imagefactory.build.base.image import BaseImage, as_coming
from imagefactory.build.protocol import Supplies
from imagefactory.lock.download import Arrivals
from imagefactory.model import LockedPackage
from imagefactory.oci.unpack import Unpacked


def supplies(
    base: BaseImage,
    packages: Callable[[], Mapping[LockedPackage, Path]] = dict,
    unpacked: Unpacked | None = None,
) -> Supplies:
    """That base, and what `packages` gives whenever an engine asks for them."""

    @contextmanager
    def here() -> Iterator[Arrivals]:
        arrivals = Arrivals(packages().items())
        for package in arrivals.paths:
            arrivals.tell(package)
        yield arrivals

    return Supplies(base=lambda: as_coming(base), packages=here, unpacked=unpacked)
