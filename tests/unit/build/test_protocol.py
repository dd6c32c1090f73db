"""What every engine asks of the disk before it works."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from imagefactory import fs
from imagefactory.build.protocol import require_image_space
from imagefactory.errors import StoreError
from imagefactory.model import BuildSpec
from tests.made.values import make_base, make_lock, make_target


def test_an_image_that_the_store_cannot_hold_is_not_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel = replace(make_lock().wheels[0], size=10_000_000)
    target, base, lock = make_target(), make_base(), make_lock(wheels=(wheel,))
    definition = BuildSpec(target=target, base=base, lock=lock, prefix="/opt/env", environment=(), labels=())
    usage = type(fs.shutil.disk_usage(tmp_path))
    monkeypatch.setattr(fs.shutil, "disk_usage", lambda _: usage(10**9, 0, 8_000_000))
    require_image_space(tmp_path, definition)
    monkeypatch.setattr(fs.shutil, "disk_usage", lambda _: usage(10**9, 0, 7_999_999))
    with pytest.raises(
        StoreError, match=f"{tmp_path}: the image of {definition.target.name} needs at least 8.0 MB"
    ):
        require_image_space(tmp_path, definition)
