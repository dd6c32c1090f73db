"""Real wheels of frameworks, fetched from this machine's package index by their hashes, each once a session.

Hundreds of MB each: a test asks for one by name, and all go when the session ends.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from imagefactory.lock.download import PackageCache
from imagefactory.lock.pypi.index import find_index
from imagefactory.lock.pypi.uv import UvLocker
from imagefactory.model import LockedWheel
from imagefactory.progress import QuietProgress
from imagefactory.settings.choices import SettingValue
from tests.made.values import make_lock

_TAGS = {"1": "manylinux1_x86_64", "28": "manylinux_2_28_x86_64"}


def _torch(version: str, tag: str, sha256: str, size: int) -> LockedWheel:
    filename = f"torch-{version}-cp311-cp311-{_TAGS[tag]}.whl"
    return LockedWheel(name="torch", version=version, filename=filename, sha256=sha256, size=size)


WHEELS = {
    f"torch-{wheel.version}": wheel
    for wheel in (
        _torch("1.13.1", "1", "22128502fd8f5b25ac1cd849ecb64a418382ae81dd4ce2b5cebaa09ab15b0d9b", 887431784),
        _torch("2.3.1", "1", "b2ec81b61bb094ea4a9dee1cd3f7b76a44555375719ad29f05c0ca8ef596ad39", 779156414),
        _torch("2.9.1", "28", "d033ff0ac3f5400df862a51bdde9bad83561f3739ea0046e68f5401ebfa67c1b", 899821446),
        _torch("2.12.1", "28", "6e29e7e74d05bda7d955c75e99459f878ebd970ef851b4057edbd3b34a5eb4a3", 532169264),
    )
}
_LOCK = make_lock(target="wheels-1-cu0", content_hash="sha256:0", solver="none", wheels=())


@dataclass(frozen=True, kw_only=True)
class Wheels:
    """`folder` is a cache of packages."""

    folder: Path

    def fetch(self, name: str) -> Path:
        """The wheel called `torch-2.3.1`. Raises what a build would where it cannot be had."""
        wheel = WHEELS[name]
        setting = SettingValue(value="", origin="default")
        index = find_index(setting, environ=os.environ, prefix=Path(sys.prefix))
        uv = UvLocker(index, python=Path(sys.executable))

        def locate(missing: tuple[LockedWheel, ...]) -> dict[str, str]:
            return uv.addresses(replace(_LOCK, wheels=missing))

        return PackageCache(self.folder, index).fetch([wheel], locate, QuietProgress())[wheel]

    def drop(self, name: str) -> None:
        """Frees the disk of one that no further test wants."""
        shutil.rmtree(self.folder / "wheels" / WHEELS[name].sha256[:2], ignore_errors=True)


@contextmanager
def wheels_folder(folder: Path) -> Iterator[Wheels]:
    try:
        yield Wheels(folder=folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Wheels]:
    with wheels_folder(tmp_path_factory.mktemp("wheels")) as found:
        yield found
