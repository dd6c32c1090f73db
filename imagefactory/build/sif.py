"""Build .sif files from images: apptainer's container around our own squashfs.

Layers become a squashfs without being unpacked (oci/squash_layers.py), each packed once for all images.
Apptainer's additions to an image depend only on the image's config. So apptainer builds a .sif of an empty
image with that config. Its files are added to the layers, and its container is put around them. The same
image, apptainer and zstd give the same file, because every time in it is the image's own.
"""

from __future__ import annotations

import io
import json
import re
import stat
import tarfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from imagefactory.build.apptainer import SHARED_IMAGE, get_cached_sif, record_sif, scratch, sif_key
from imagefactory.errors import BuildError, StoreError
from imagefactory.oci.layers import END_OF_ARCHIVE
from imagefactory.oci.layout import Layout
from imagefactory.oci.manifests import (
    CONFIG_TYPE,
    MANIFEST_TYPE,
    Descriptor,
    Image,
    SifArtifact,
    canonical_json,
    format_descriptor,
)
from imagefactory.oci.sif import SifOrigin, around, for_processor, store_sif
from imagefactory.oci.squash_layers import (
    VERSION,
    LayerPacker,
    PackerPool,
    SquashCompression,
    SquashRow,
    SquashStore,
    StoredSifChangedError,
    format_image,
)
from imagefactory.oci.squashfs import SUPERBLOCK
from imagefactory.oci.store import REBUILD
from imagefactory.progress import Progress, QuietProgress
from imagefactory.runtime.apptainer_command import ApptainerCommand, SifRequest
from imagefactory.scan.layers import unpacked_sif
from imagefactory.trees import walk_tree

SQUEEZES = {
    "fast": SquashCompression(level=1, block=128 << 10),
    "small": SquashCompression(level=15, block=1 << 20),
}
"""The compressions of a .sif's squashfs, by name.

Blocks of 128 KiB are mksquashfs's default: the cost to read a page of a library that is not in memory. For
pytorch-2.3-cu121 (5.4 GB), in percent of its size: zstd 1 has 56.0 % in such blocks and 52.3 % in blocks of
1 MiB; gzip 9, mksquashfs's default, has 53.9 % at a fortieth of the speed.
"""
_BUILT_AT = re.compile(rb'("org\.label-schema\.build-date": ?")[^"]*')
_BUILT_FOR = re.compile(rb'("org\.label-schema\.build-arch": ?")[^"]*')


class SifBuilder:
    """Builds .sif files from images of `layout`, one for each compression and apptainer version."""

    def __init__(self, layout: Layout, command: ApptainerCommand, *, workers: int) -> None:
        self.layout, self.command, self.workers = layout, command, workers

    def make(self, image: Image, target: str, compression: str, progress: Progress) -> SifArtifact:
        """Return the .sif of `image`, stored with the image as its subject and named after `target`.

        Environment, labels and command are the image's, as apptainer itself converts its config. Raises
        ToolError, BuildError or StoreError. The caller holds the layout's `in_use`.
        """
        version = self.command.require(building=True)
        squeeze = SQUEEZES[compression]
        key = sif_key("squash", str(VERSION), squeeze.identity, image.manifest, target, version)
        with self.layout.locked(f"sif-{key}"):
            known = get_cached_sif(self.layout, key)
            if known:
                return known
            with scratch(self.layout) as directory, progress.stage(f"{target}: make a .sif ({compression})"):
                sif = self._make(
                    image, SifOrigin(target=target, compression=compression), directory, progress
                )
            record_sif(self.layout, key, sif)
            return sif

    def _make(self, image: Image, origin: SifOrigin, directory: Path, progress: Progress) -> SifArtifact:
        squeeze = SQUEEZES[origin.compression]
        store = SquashStore(self.layout, squeeze, self.workers)
        layers = list({layer.diff_id: layer for layer in image.layers}.values())
        places = {layer.diff_id: number for number, layer in enumerate(layers)}
        order = [places[layer.diff_id] for layer in image.layers]
        subject = self.layout.manifest(image.manifest)
        if subject is None:
            raise StoreError(
                "manifest-missing", f"{image.manifest} is not in {self.layout.path}", hint=REBUILD
            )
        output = directory / "made.sif"
        while True:
            dress = self._dress(image, squeeze, directory)
            rows = [*store.rows(layers, directory, progress), dress.row]
            sized = [(row.index, row.size) for row in rows]
            superblock, tables = format_image(sized, order, squeeze, mtime=dress.moment)
            size = SUPERBLOCK + sum(row.size for row in rows) + len(tables)
            try:
                with progress.task("write the .sif", total=sum(row.size for row in rows)) as task:
                    digest, rows = store.write(output, dress.container(size) + superblock, rows, tables, task)
            except StoredSifChangedError as error:
                output.unlink()
                progress.note(
                    f"  a .sif of the store changed on disk: {layers[error.place].title} is packed again"
                )
                store.forget(layers[error.place])
                continue
            sif = store_sif(self.layout, output, replace(origin, subject=subject[0]), digest=digest)
            for layer, row in zip(layers, rows, strict=False):
                store.remember(layer, sif.file.digest, row)
            return sif

    def _dress(self, image: Image, squeeze: SquashCompression, directory: Path) -> _SifMetadata:
        """Return apptainer's additions to an image without files that has the config of `image`."""
        config = json.loads(self.layout.read(Descriptor(media_type="", digest=image.config, size=0)))
        empty = Layout(directory / SHARED_IMAGE)
        layer = empty.add(END_OF_ARCHIVE, "application/vnd.oci.image.layer.v1.tar")
        bare = {**config, "history": [], "rootfs": {"type": "layers", "diff_ids": [layer.digest]}}
        manifest = {
            "schemaVersion": 2,
            "mediaType": MANIFEST_TYPE,
            "config": format_descriptor(empty.add(canonical_json(bare), CONFIG_TYPE)),
            "layers": [format_descriptor(layer)],
        }
        empty.tag(SHARED_IMAGE, empty.add(canonical_json(manifest), MANIFEST_TYPE))
        output = directory / "empty.sif"
        self.command.build(
            SifRequest(folder=directory, spec=f"oci:{SHARED_IMAGE}", output=output), lambda _: None
        )
        moment = _moment(config.get("created"))
        date, processor = rb"\g<1>" + _apptainer_time(moment), rb"\g<1>" + image.architecture.encode()

        def change(text: bytes) -> bytes:
            text = _BUILT_AT.sub(date, text)
            return _BUILT_FOR.sub(processor, text) if image.architecture else text

        row = directory / "dress"
        with (
            unpacked_sif(output, directory, QuietProgress()) as root,
            row.open("wb") as out,
            PackerPool(squeeze, 1) as packers,
            LayerPacker(out, packers) as packer,
        ):
            _pack_directory(root, packer, change, moment)
        empty_sif = output.read_bytes()

        def container(size: int) -> bytes:
            try:
                return for_processor(around(empty_sif, change, size, moment), image.architecture)
            except ValueError as error:
                hint = "install apptainer 1.4, which is supported"
                raise BuildError(
                    "sif-unsupported",
                    f"this version of apptainer writes unsupported .sif files: {error}",
                    hint=hint,
                ) from error

        size = packer.size
        return _SifMetadata(
            row=SquashRow(index=packer.index, path=row, offset=0, size=size),
            moment=moment,
            container=container,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _SifMetadata:
    """The additions of apptainer: `row` has its files, `container` returns the bytes before a partition.

    `moment` is the time of all of it, in seconds since 1970.
    """

    row: SquashRow
    moment: int
    container: Callable[[int], bytes]


def _pack_directory(root: Path, packer: LayerPacker, change: Callable[[bytes], bytes], moment: int) -> None:
    """Pack the files of `root` as root's, every text through `change`."""
    for name, state in sorted(walk_tree(root), key=lambda entry: entry[0]):
        member = tarfile.TarInfo(name)
        member.mode, member.mtime = stat.S_IMODE(state.st_mode), moment
        parts = tuple(name.split("/"))
        if stat.S_ISDIR(state.st_mode):
            packer.folder(parts, member)
        elif stat.S_ISLNK(state.st_mode):
            member.linkname = str((root / name).readlink())
            packer.symlink(parts, member)
        else:
            data = change((root / name).read_bytes())
            member.size = len(data)
            packer.file(parts, member, io.BytesIO(data))


def _moment(created: object) -> int:
    """Return a config's `created` (RFC 3339) in seconds since 1970, 0 for none."""
    try:
        seconds = int(datetime.fromisoformat(str(created)).timestamp())
    except ValueError:
        return 0
    return min(max(seconds, 0), (1 << 32) - 1)


def _apptainer_time(moment: int) -> bytes:
    """Return a time as apptainer writes it: `Monday_2_January_2006_15:4:5_UTC`."""
    time = datetime.fromtimestamp(moment, UTC)
    return f"{time:%A}_{time.day}_{time:%B}_{time.year}_{time.hour}:{time.minute}:{time.second}_UTC".encode()
