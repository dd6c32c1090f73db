"""Packages that are still being fetched, for those who work on each as soon as it is there."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from pathlib import Path

from imagefactory.model import LockedPackage


class Arrivals:
    """Packages on their way to `paths`, their places in the cache: any thread can wait for one of them.

    `stop` ends what is under way; what has come is kept.
    """

    def __init__(self, paths: Iterable[tuple[LockedPackage, Path]]) -> None:
        self.paths = dict(paths)
        self.stop = threading.Event()
        self._here: dict[Path, Future[None]] = {path: Future() for path in self.paths.values()}

    def tell(self, package: LockedPackage) -> None:
        """`package` is whole."""
        self._here[self.paths[package]].set_result(None)

    def fail(self, error: BaseException) -> None:
        """Nothing more will come; whoever waits gets `error`."""
        for future in self._here.values():
            if not future.done():
                future.set_exception(error)

    def wait(self, path: Path) -> None:
        """Returns when the package at `path` is whole. Raises what it failed of."""
        self._here[path].result()

    def wait_for_all(self) -> Mapping[LockedPackage, Path]:
        """Where all packages are, once they are whole. Raises what one failed of."""
        for path in self._here:
            self.wait(path)
        return self.paths
