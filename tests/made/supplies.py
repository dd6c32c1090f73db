"""What engines are handed where everything is at hand already."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from imagefactory.build.base.image import BuiltBase, as_pending_base
from imagefactory.build.protocol import BuildInputs
from imagefactory.lock.download import PendingDownloads
from imagefactory.model import LockedPackage
from imagefactory.oci.unpack import UnpackedLayers


def supplies(
    base: BuiltBase,
    packages: Callable[[], Mapping[LockedPackage, Path]] = dict,
    unpacked: UnpackedLayers | None = None,
) -> BuildInputs:
    """That base, and what `packages` gives whenever an engine asks for them."""

    @contextmanager
    def here() -> Iterator[PendingDownloads]:
        arrivals = PendingDownloads(packages().items())
        for package in arrivals.paths:
            arrivals.tell(package)
        yield arrivals

    return BuildInputs(base=lambda: as_pending_base(base), packages=here, unpacked=unpacked)
