"""A .sif of an image against mksquashfs with its defaults and against apptainer: the case `sif`.

    first       no layer was ever packed
    changed     one small layer of the image is another than in the .sif before
    mksquashfs  its defaults (gzip 9) on the image's tree, which lies there unpacked
    apptainer   its own build of the same image with `-comp zstd -Xcompression-level 1`

The image is in a store (`imagefactory build TARGET`), which stays as it is: blobs are reached by links.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from imagefactory.build.apptainer import share_layout
from imagefactory.build.sif import SifBuilder
from imagefactory.oci.layout import Layout
from imagefactory.oci.manifests import (
    CONFIG_TYPE,
    MANIFEST_TYPE,
    Image,
    SifArtifact,
    canonical_json,
    format_descriptor,
)
from imagefactory.progress import QuietProgress
from imagefactory.runtime.apptainer_command import ApptainerCommand, SifRequest
from imagefactory.scan.layers import unpacked_sif
from tests.made.layer_store import TAR, file, make_tar


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Seconds until all of a file is on the disk, those of all processors together, and its bytes."""

    seconds: float
    cpu: float
    size: int


class Bench:
    """A store of its own below `folder`, with one image of another one."""

    def __init__(self, folder: Path, source: Layout, tag: str) -> None:
        self.layout = Layout(folder / "store")
        self.command = ApptainerCommand(os.environ)
        found = source.tags().get(tag)
        if found is None:
            raise SystemExit(f"{tag} is not in {source.path}: build it first")
        image = source.load(tag, found)
        blobs = [found.digest, image.manifest, image.config, *(one.descriptor.digest for one in image.layers)]
        for digest in blobs:
            link = self.layout.blob_path(digest)
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(source.blob_path(digest).absolute())
        self.image = self.layout.load(tag, found)

    def with_layer(self, content: str) -> Image:
        """The image with one small layer more."""
        layer = self.layout.add(make_tar(file("opt/small", content.encode())), TAR)
        manifest = json.loads(self.layout.blob_path(self.image.manifest).read_bytes())
        config = json.loads(self.layout.blob_path(self.image.config).read_bytes())
        config["rootfs"]["diff_ids"].append(layer.digest)
        manifest["config"] = format_descriptor(self.layout.add(canonical_json(config), CONFIG_TYPE))
        manifest["layers"].append(format_descriptor(layer))
        return self.layout.load("small", self.layout.add(canonical_json(manifest), MANIFEST_TYPE))

    def make(self, image: Image) -> SifArtifact:
        maker = SifBuilder(self.layout, self.command, workers=len(os.sched_getaffinity(0)))
        return maker.make(image, "image", "fast", QuietProgress())

    def apptainer(self, folder: Path) -> Path:
        share_layout(self.layout, self.image.manifest, folder / "image")
        output = folder / "apptainer.sif"
        self.command.build(SifRequest(folder=folder, spec="oci:image", output=output), lambda _: None)
        return output


def measure(work: Callable[[], Path]) -> Measured:
    os.sync()
    began, busy = time.monotonic(), sum(os.times()[:4])
    path = work()
    with path.open("rb") as made:
        os.fsync(made.fileno())
    seconds, cpu = time.monotonic() - began, sum(os.times()[:4]) - busy
    return Measured(seconds=seconds, cpu=cpu, size=path.stat().st_size)


def trial(folder: Path, source: Layout, tag: str) -> dict[str, Measured]:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    bench = Bench(folder, source, tag)
    found = {"first": measure(lambda: bench.make(bench.with_layer("1")).path)}
    made = bench.make(bench.with_layer("1"))
    found["changed"] = measure(lambda: bench.make(bench.with_layer("2")).path)
    made.path.unlink()
    made = bench.make(bench.with_layer("2"))
    with unpacked_sif(made.path, folder, QuietProgress()) as tree:
        made.path.unlink()
        plain = folder / "plain.squashfs"

        def squash() -> Path:
            command = ["mksquashfs", str(tree), str(plain), "-no-progress", "-quiet"]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
            return plain

        found["mksquashfs"] = measure(squash)
        plain.unlink()
    found["apptainer"] = measure(lambda: bench.apptainer(folder))
    return found
