"""An image of the store as a module of a site's software."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from imagefactory.access import Access
from imagefactory.errors import BuildError, UsageError, os_problem
from imagefactory.project import Factory
from imagefactory.fs import replacing
from imagefactory.model import Target
from imagefactory.oci.inflate import DamagedError, plain_layer
from imagefactory.oci.layout_store import LayoutStore
from imagefactory.oci.model import Image
from imagefactory.oci.tar_stream import FILE, FOLDER, HIDDEN, REMOVED, TarStream, entries, layer_error
from imagefactory.oci.tree import OPAQUE, WHITEOUT
from imagefactory.progress import Progress
from imagefactory.build.definition import PREFIX
from imagefactory.render.module import HEAD, Module, format_modulefile, format_wrapper, is_program
from imagefactory.scan.layers import bounded
from imagefactory.stages.export import SifExport, export_sif
from imagefactory.stages.stored import stored_image
from imagefactory.trees import remove_tree

BIN = f"{PREFIX.removeprefix('/')}/bin/"


def write_module(factory: Factory, target: Target, folder: Path, progress: Progress) -> Module:
    """Writes image, wrappers and modulefile, in this order: what a user finds is whole at any moment.

    Raises BuildError for an image that is not in the store, UsageError for a folder that cannot be written
    or named.
    """
    folder = folder.absolute()
    image = stored_image(factory, target)
    if image is None:
        raise BuildError(
            "image-not-built", f"{target.name} is not built", hint=f"run imagefactory build {target.name}"
        )
    try:
        (folder / "images").mkdir(parents=True, exist_ok=True)
        sif, made = export_sif(factory, target, SifExport(output=folder / "images/.new.sif"), progress)
        with progress.stage(f"{target.name}: the image's programs"):
            programs = programs_of(factory, image, scripts=target.source == "conda", progress=progress)
        module = Module(target=target, folder=folder, image=sif.name, programs=programs)
        text = format_modulefile(module)
        made.replace(folder / "images" / sif.name)
        _write_wrappers(module)
        path = folder / module.modulefile
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as file:
            file.write(text.encode())
    except OSError as error:
        raise UsageError(
            *os_problem("write", error.filename or folder, error), hint="choose another directory: -o DIR"
        ) from error
    return module


def _write_wrappers(module: Module) -> None:
    """Beside, and then in the place of those that are there."""
    place = module.folder / module.wrappers
    fresh = place.with_name(f".{place.name}.new")
    if fresh.exists():
        remove_tree(fresh)
    (fresh / "bin").mkdir(parents=True)
    (fresh / "run").write_text(format_wrapper(module))
    (fresh / "run").chmod(0o755)
    for name in module.programs:
        (fresh / "bin" / name).symlink_to("../run")
    if place.exists():
        remove_tree(place)
    fresh.rename(place)


def programs_of(access: Access, image: Image, *, scripts: bool, progress: Progress) -> tuple[str, ...]:
    """The names of programs in the environment's bin, by the image's layers; see `is_program`."""
    found: set[str] = set()
    with progress.task("read layers", total=sum(one.descriptor.size for one in image.layers)) as task:
        for layer in image.layers:
            chunks: Iterator[bytes] = LayoutStore(access.layout).read("", layer.descriptor)
            try:
                _add(found, bounded(plain_layer(layer.descriptor.media_type, chunks)), scripts=scripts)
            except DamagedError as error:
                raise layer_error(layer.descriptor.digest, error) from error
            task.advance(layer.descriptor.size)
    return tuple(sorted(found))


def _add(found: set[str], chunks: Iterator[bytes], *, scripts: bool) -> None:
    stream = TarStream(chunks)
    for entry in entries(stream):
        name = entry.path.removeprefix(BIN)
        if entry.path.startswith(BIN) and "/" not in name and entry.kind != FOLDER:
            head = entry.read(HEAD) if entry.kind == FILE else b""
            if entry.kind == HIDDEN and name == OPAQUE:
                found.clear()
            elif entry.kind in (HIDDEN, REMOVED):
                found.discard(name.removeprefix(WHITEOUT))
            elif is_program(name, head, scripts=scripts):
                found.add(name)
    stream.drain()
