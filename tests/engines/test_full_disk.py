"""Nightly runs whose store is on a full disk, a real one of a few MB."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from imagefactory.factory import read_factory
from imagefactory.oci.registry.client import Registry
from imagefactory.progress import Quiet
from imagefactory.settings.load import load_settings
from imagefactory.stages.night import NIGHTS
from imagefactory.stages.nights import LOG, NIGHT, RESERVE, RESERVED, read_night
from imagefactory.stages.push import PushOptions, push_target
from tests.made.factory import NAME
from tests.made.pushed import put_base, put_built
from tests.made.trusted import write_settings

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True, slots=True, kw_only=True)
class FullDisk:
    """A project with one image in a registry; store and cache are on `disk`."""

    root: Path
    disk: Path
    environ: dict[str, str]
    registry: str

    def start(self, *words: str, output: Path | None = None) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "imagefactory", "-C", str(self.root), *words]
        with (output or Path(os.devnull)).open("w") as file:
            where: Any = file if output else subprocess.PIPE
            return subprocess.run(
                command, env=self.environ, stdout=where, stderr=subprocess.PIPE, text=True, timeout=120,
                stdin=subprocess.DEVNULL,
            )  # fmt: skip

    def fill(self) -> None:
        """Fill the disk to the last byte."""
        with (self.disk / "filled").open("ab", buffering=0) as file:
            for size in (1 << 16, 1 << 12, 1):
                try:
                    while True:
                        file.write(bytes(size))
                except OSError:
                    continue

    def catalog(self) -> str:
        host, _, path = self.registry.partition("/")
        found = Registry(host).manifest(f"{path}/catalogue", "current")
        return found[0].digest if found else ""


@pytest.fixture
def full(tmp_path: Path, registry: str) -> Iterator[FullDisk]:
    disk, root = tmp_path / "disk", tmp_path / "root"
    disk.mkdir()
    for folder in ("recipes", "lockfiles/bases"):
        (root / folder).mkdir(parents=True)
    files = ("recipes/bases.yaml", "recipes/pytorch.yaml", f"lockfiles/{NAME}.requirements.txt")
    for name in (*files, "lockfiles/bases/debian-12.lock"):
        shutil.copy(ROOT / name, root / name)
    environ = {
        "HOME": str(tmp_path / "home"),
        "PATH": os.environ["PATH"],
        "IMAGEFACTORY_STORE": str(disk / "store"),
        "IMAGEFACTORY_CACHE": str(disk / "cache"),
        "IMAGEFACTORY_REGISTRY": f"{registry}/full",
    }
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=12m", "tmpfs", str(disk)], check=True)
    try:
        write_settings(root, "", environ)
        factory = read_factory(load_settings(directory=root, start=root, environ=environ), environ)
        target = next(one for one in factory.targets if one.name == NAME)
        factory.layout.make()
        put_base(factory, target)
        put_built(factory, target)
        push_target(factory, target, PushOptions(now=datetime.now(UTC), registry=f"{registry}/full"), Quiet())
        made = FullDisk(root=root, disk=disk, environ=environ, registry=f"{registry}/full")
        for words in (("keys", "new", "lab"), ("keys", "trust", "lab")):
            assert made.start(*words).returncode == 0
        yield made
    finally:
        subprocess.run(["umount", "--lazy", str(disk)], check=True)


def test_nights_on_a_full_disk_sign_the_catalog_and_send_mail(full: FullDisk, tmp_path: Path) -> None:
    """stdout is on that disk too. The first full night has the reserve for its log, the second nothing."""
    mail = tmp_path / "mail"
    words = ("night", NAME, "--json", "--mail", f"cat > {mail}")
    first = full.start(*words)
    assert (first.returncode, json.loads(first.stdout)["broken"]) == (0, []), first.stderr
    signed, nights = {full.catalog()}, full.disk / "store/nights"
    assert (nights / RESERVED).stat().st_size == RESERVE
    full.fill()
    second = full.start(*words, output=full.disk / "second.out")
    assert second.returncode == 7, second.stderr
    assert "no space left" in mail.read_text()
    assert full.catalog() not in signed
    signed.add(full.catalog())
    assert not (nights / RESERVED).exists()
    folder = max(path for path in nights.iterdir() if path.is_dir())
    assert [row.what for row in read_night(folder / NIGHT).broken] == [NIGHTS]
    assert "imagefactory catalogue" in (folder / LOG).read_text()
    full.fill()
    mail.unlink()
    third = full.start(*words, output=full.disk / "third.out")
    assert third.returncode == 7, third.stderr
    assert "Traceback" not in third.stderr
    assert "no space left" in mail.read_text()
    assert full.catalog() not in signed
