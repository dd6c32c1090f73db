"""Build .sif and .sqsh files from images, by our own squashfs.

Layers become a squashfs without being unpacked (oci/squash_layers.py), each packed once for all images.
Apptainer's additions to an image depend only on the image's config. So apptainer builds a .sif of an empty
image with that config. Its files are added to the layers, and its container is put around them. The same
image, apptainer and zstd give the same file, because every time in it is the image's own.

A .sqsh is for enroot, which Slurm's plugin pyxis uses: a squashfs with files that have the contents of the
OCI config. Source: NVIDIA enroot 4.1, doc/image-format.md, and what `enroot import` writes.
"""

from __future__ import annotations

import io
import json
import re
import shlex
import shutil
import stat
import tarfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path, PurePosixPath
from typing import Any

from imagefactory.build.apptainer import SHARED_IMAGE, get_cached_sif, record_sif, scratch, sif_key
from imagefactory.errors import BuildError, StoreError, UsageError, os_problem
from imagefactory.fs import replacing
from imagefactory.oci.archive import check_output
from imagefactory.oci.layers import END_OF_ARCHIVE
from imagefactory.oci.layout import Layout
from imagefactory.oci.manifests import (
    CONFIG_TYPE,
    MANIFEST_TYPE,
    Descriptor,
    Image,
    OciLayer,
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
        subject = self.layout.manifest(image.manifest)
        if subject is None:
            raise StoreError(
                "manifest-missing", f"{image.manifest} is not in {self.layout.path}", hint=REBUILD
            )
        output = directory / "made.sif"

        def add() -> _Additions:
            return self._dress(image, squeeze, directory)

        digest, rows = _write_squashed(store, image, add, output, progress)
        sif = store_sif(self.layout, output, replace(origin, subject=subject[0]), digest=digest)
        for layer, row in zip(_layers(image), rows, strict=False):
            store.remember(layer, sif.file.digest, row)
        return sif

    def _dress(self, image: Image, squeeze: SquashCompression, directory: Path) -> _Additions:
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

        with (
            unpacked_sif(output, directory, QuietProgress()) as root,
            _new_row(directory / "dress", squeeze) as packer,
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

        row = SquashRow(index=packer.index, path=directory / "dress", offset=0, size=packer.size)
        return _Additions(row=row, moment=moment, container=container)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Additions:
    """The files of a format: `row` has them, `container` returns the bytes before the squashfs.

    `moment` is the time of all of it, in seconds since 1970. With `replaces`, an entry of the image with the
    same name and another type is replaced.
    """

    row: SquashRow
    moment: int
    container: Callable[[int], bytes]
    replaces: bool = False


def _layers(image: Image) -> list[OciLayer]:
    """Return the layers of an image, each once."""
    return list({layer.diff_id: layer for layer in image.layers}.values())


def _write_squashed(
    store: SquashStore, image: Image, add: Callable[[], _Additions], output: Path, progress: Progress
) -> tuple[str, list[SquashRow]]:
    """Write the layers and the additions to `output`, a new file. Return its digest and the rows in it."""
    layers = _layers(image)
    places = {layer.diff_id: number for number, layer in enumerate(layers)}
    order = [places[layer.diff_id] for layer in image.layers]
    while True:
        additions = add()
        rows = [*store.rows(layers, additions.row.path.parent, progress), additions.row]
        sized = [(row.index, row.size) for row in rows]
        superblock, tables = format_image(
            sized, order, store.squeeze, mtime=additions.moment, replaces=additions.replaces
        )
        size = SUPERBLOCK + sum(row.size for row in rows) + len(tables)
        try:
            with progress.task(f"write {output.name}", total=sum(row.size for row in rows)) as task:
                return store.write(output, additions.container(size) + superblock, rows, tables, task)
        except StoredSifChangedError as error:
            output.unlink()
            progress.note(
                f"  a .sif of the store changed on disk: {layers[error.place].title} is packed again"
            )
            store.forget(layers[error.place])


@contextmanager
def _new_row(path: Path, squeeze: SquashCompression) -> Iterator[LayerPacker]:
    with path.open("wb") as out, PackerPool(squeeze, 1) as packers, LayerPacker(out, packers) as packer:
        yield packer


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


# --- .sqsh files


def write_sqsh(
    layout: Layout, image: Image, output: Path, *, compression: str, workers: int, progress: Progress
) -> None:
    """Write an image of `layout` for enroot and pyxis. The same image and zstd give the same file.

    Raises BuildError for a config that enroot cannot express, StoreError or UsageError. The caller holds the
    layout's `in_use`.
    """
    check_output(output)
    squeeze = SQUEEZES[compression]
    config = json.loads(layout.read(Descriptor(media_type="", digest=image.config, size=0)))
    files = enroot_files(config.get("config") or {}, f"{image.name}@{image.digest}")
    moment = _moment(config.get("created"))
    workdir = PurePosixPath("/", (config.get("config") or {}).get("WorkingDir") or "/")
    with scratch(layout) as directory:
        new = directory / "image.sqsh"

        def add() -> _Additions:
            with _new_row(directory / "enroot", squeeze) as packer:
                packer.ensure_folder(workdir.parts[1:])
                for name, text in files.items():
                    data = text.encode()
                    member = tarfile.TarInfo(name)
                    member.mode, member.mtime, member.size = 0o644, moment, len(data)
                    packer.file(tuple(name.split("/")), member, io.BytesIO(data))
            row = SquashRow(index=packer.index, path=directory / "enroot", offset=0, size=packer.size)
            return _Additions(row=row, moment=moment, container=lambda _: b"", replaces=True)

        _write_squashed(SquashStore(layout, squeeze, workers), image, add, new, progress)
        try:
            with new.open("rb") as source, replacing(output) as file:
                shutil.copyfileobj(source, file, 1 << 20)
        except OSError as error:
            raise UsageError(
                *os_problem("write", output, error), hint="choose another file: -o FILE"
            ) from error


def enroot_files(config: Mapping[str, Any], origin: str) -> dict[str, str]:
    """Return the files that tell enroot an OCI config, by path: environment, mounts and commands.

    `origin` is named in a comment. Raises BuildError for what enroot would change.
    """
    environment = [str(row) for row in config.get("Env") or ()]
    words = [str(word) for key in ("Entrypoint", "Cmd") for word in config.get(key) or ()]
    volumes = sorted(config.get("Volumes") or ())
    for row in environment:
        # enroot reads a variable by line, and replaces ${NAME} by the variable of the machine.
        if "\n" in row or re.search(r"\$\{[A-Za-z_][A-Za-z0-9_]*\}", row):
            raise BuildError(
                "enroot-unsupported",
                f"enroot would change the image's variable {row.partition('=')[0]}: {row!r}",
                hint="write its value without line ends and ${...}: `environment:` of the recipe",
            )
    for path in volumes:
        if not re.fullmatch(r"/[^\s\\$]*", path):
            raise BuildError(
                "enroot-unsupported",
                f"enroot cannot mount the image's volume {path!r}",
                hint="remove it from the image's config",
            )
    path = next((row.removeprefix("PATH=") for row in environment if row.startswith("PATH=")), "")
    workdir = shlex.quote(config.get("WorkingDir") or "/")
    entrypoint = shlex.join(map(str, config.get("Entrypoint") or ()))
    default = shlex.join(words) or "/bin/sh"
    labels = sorted((config.get("Labels") or {}).items())
    comments = [f"# {origin}", *(f"# {' '.join(f'{name} {value}'.split())}" for name, value in labels)]
    start = (
        f"mkdir -p {workdir} 2>/dev/null\ncd {workdir} && unset OLDPWD || exit 1\n"
        "if [ -s /etc/rc.local ]; then . /etc/rc.local; fi\n"
        f'if [ $# -gt 0 ]; then exec {entrypoint}{" " if entrypoint else ""}"$@"; else exec {default}; fi\n'
    )
    return {
        "etc/environment": "".join(f"{row}\n" for row in environment),
        "etc/fstab": "".join(
            f"${{ENROOT_ROOTFS}}{path} {path} none x-create=dir,bind,rw,nosuid,nodev\n" for path in volumes
        ),
        "etc/rc": "\n".join(comments) + "\n\n" + start,
        # enroot starts a login shell, and Debian's /etc/profile resets PATH before it reads these files.
        "etc/profile.d/zz-image-path.sh": f"export PATH={shlex.quote(path)}\n" if path else "",
        "etc/rc.local": "# /etc/rc reads this file before the command of the container starts.\n",
    }


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
