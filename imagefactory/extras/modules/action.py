"""Write an image as an environment module: a modulefile, and a wrapper for each program."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Literal, TypedDict

from imagefactory.access import Access
from imagefactory.actions.images import stored_image
from imagefactory.actions.transfer import export_sif
from imagefactory.build.definition import PREFIX
from imagefactory.errors import BuildError, UsageError, os_problem
from imagefactory.fs import replacing
from imagefactory.gpu.values import platform_of, rocm_of
from imagefactory.model import Target
from imagefactory.oci.inflate import CorruptDataError, plain_layer
from imagefactory.oci.layout import LayoutStore, reference
from imagefactory.oci.manifests import Image
from imagefactory.oci.tar_stream import DIRECTORY, FILE, HIDDEN, REMOVED, TarStream, entries, layer_error
from imagefactory.oci.tree import OPAQUE, WHITEOUT
from imagefactory.progress import Progress
from imagefactory.project import Project
from imagefactory.scan.layers import bounded
from imagefactory.trees import remove_tree

# --- The files of a module. Pure
#     FOLDER/modulefiles/FAMILY/VERSION      Tcl, for Lmod and Environment Modules
#     FOLDER/images/TARGET-<12 digits>.sif
#     FOLDER/wrappers/TARGET-<12 digits>/run, and bin/NAME, a link to it for each program
# A wrapper runs the program of its own name in the image. It finds the image relative to itself.


_PROGRAM = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,100}")
_SAFE = re.compile(r"[A-Za-z0-9/._+@:,=-]+")
_ELF, _SCRIPT, _PYTHON = b"\x7fELF", b"#!", b"#!/opt/env/bin/python"
HEAD = len(_PYTHON)
"""The number of bytes at the start of a file that show whether it is a program."""


def is_program(name: str, head: bytes, *, scripts: bool) -> bool:
    """Return whether a file in the environment's bin gets a wrapper, by its name and first bytes.

    Python and programs do. With `scripts`, only Python and its scripts do: a conda environment also has
    system programs (`clear`, `xz`), which users want from their system.
    """
    if not _PROGRAM.fullmatch(name):
        return False
    if name.startswith("python") or head.startswith(_PYTHON):
        return True
    return not scripts and head.startswith((_ELF, _SCRIPT))


class ModuleExportDocument(TypedDict):
    """The environment module of an image."""

    format: Literal["imagefactory.image-export-module/1"]
    target: str
    modulefile: str
    image: str
    programs: list[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentModule:
    """An environment module. `folder` is its directory, `image` the name of its .sif."""

    target: Target
    folder: Path
    image: str
    programs: tuple[str, ...]

    @property
    def modulefile(self) -> PurePosixPath:
        """The path of the modulefile below the directory."""
        family, _, version = reference(self.target).partition(":")
        return PurePosixPath("modulefiles", family, version)

    @property
    def wrappers(self) -> PurePosixPath:
        """The path of the wrappers below the directory."""
        return PurePosixPath("wrappers", self.image.removesuffix(".sif"))

    @property
    def text(self) -> str:
        """The message to print."""
        loaded = "/".join(self.modulefile.parts[1:])
        return (
            f"wrote {self.folder / self.modulefile}\n  image     {self.image}\n"
            f"  programs  {len(self.programs)}, such as {', '.join(self.programs[:4])}\n"
            f"try it: module use {self.folder / self.modulefile.parts[0]} && module load {loaded} && python"
        )

    def as_json(self) -> ModuleExportDocument:
        return ModuleExportDocument(
            format="imagefactory.image-export-module/1",
            target=self.target.name,
            modulefile=str(self.folder / self.modulefile),
            image=str(self.folder / "images" / self.image),
            programs=list(self.programs),
        )


def format_modulefile(module: EnvironmentModule) -> str:
    """Return the modulefile. Raises UsageError for a directory with special characters of Tcl."""
    directory = str(module.folder)
    if not _SAFE.fullmatch(directory):
        raise UsageError(
            "option-invalid",
            f"a modulefile cannot have the directory {directory[:100]!r}",
            hint="use only letters, digits and . _ + - /, such as -o /software/imagefactory",
        )
    target = module.target
    title = f"{target.family} {target.version}, {platform_of(target.cuda)}, Python {target.python}"
    lines = [
        "#%Module1.0",
        f"# {target.name}, written by `imagefactory image export --format module`: to change it, export it "
        "again.",
        f"set root {directory}",
        f"module-whatis {{{title}: the image {module.image}}}",
        "proc ModulesHelp { } {",
        f"    puts stderr {{{title}.}}",
        f"    puts stderr {{python and the other programs of the image run in {module.image}.}}",
        "    puts stderr {Other directories than the current one: export APPTAINER_BIND=/data,/scratch}",
        "}",
        f"conflict {target.family}",
        f"prepend-path PATH $root/{module.wrappers}/bin",
        f"setenv IMAGEFACTORY_IMAGE $root/images/{module.image}",
    ]
    return "\n".join(lines) + "\n"


def format_wrapper(module: EnvironmentModule) -> str:
    """Return the script to which all program names link."""
    target = module.target
    gpu = "--rocm" if rocm_of(target.cuda) else "--nv"
    device = "/dev/kfd" if rocm_of(target.cuda) else "/dev/nvidiactl"
    gpu_line = f"gpu=\nif [ -e {device} ]; then gpu={gpu}; fi\n" if target.gpu else "gpu=\n"
    return (
        "#!/bin/sh\n"
        f"# Runs the program of this name in the image of {target.name}. Written by `imagefactory image "
        "export --format module`.\n"
        'here=$(dirname "$(readlink -f "$0")")\n'
        'command -v apptainer >/dev/null || { echo "${0##*/}: there is no apptainer here" >&2; exit 127; }\n'
        f"{gpu_line}"
        "# shellcheck disable=SC2086 # no word or one\n"
        f'exec apptainer exec $gpu --env PYTHONNOUSERSITE=1 "$here/../../images/{module.image}" \\\n'
        f'    "{PREFIX}/bin/${{0##*/}}" "$@"\n'
    )


# --- Write the files


BIN = f"{PREFIX.removeprefix('/')}/bin/"


def write_module(factory: Project, target: Target, directory: Path, progress: Progress) -> EnvironmentModule:
    """Write image, wrappers and modulefile in this order, so that users never see an incomplete module.

    Raises BuildError if the image is not in the store, UsageError for an invalid or unwritable directory.
    """
    directory = directory.absolute()
    image = stored_image(factory, target)
    if image is None:
        raise BuildError(
            "image-not-built",
            f"{target.name} is not built",
            hint=f"run imagefactory build {target.name}",
        )
    try:
        (directory / "images").mkdir(parents=True, exist_ok=True)
        sif, new_sif = export_sif(factory, target, progress, output=directory / "images/.new.sif")
        with progress.stage(f"{target.name}: the image's programs"):
            programs = programs_of(factory, image, scripts=target.source == "conda", progress=progress)
        module = EnvironmentModule(target=target, folder=directory, image=sif.name, programs=programs)
        text = format_modulefile(module)
        new_sif.replace(directory / "images" / sif.name)
        _write_wrappers(module)
        path = directory / module.modulefile
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as file:
            file.write(text.encode())
    except OSError as error:
        raise UsageError(
            *os_problem("write", error.filename or directory, error), hint="choose another directory: -o DIR"
        ) from error
    return module


def _write_wrappers(module: EnvironmentModule) -> None:
    """Write the new wrappers, then replace the old ones."""
    wrapper_directory = module.folder / module.wrappers
    fresh = wrapper_directory.with_name(f".{wrapper_directory.name}.new")
    if fresh.exists():
        remove_tree(fresh)
    (fresh / "bin").mkdir(parents=True)
    (fresh / "run").write_text(format_wrapper(module))
    (fresh / "run").chmod(0o755)
    for name in module.programs:
        (fresh / "bin" / name).symlink_to("../run")
    if wrapper_directory.exists():
        remove_tree(wrapper_directory)
    fresh.rename(wrapper_directory)


def programs_of(access: Access, image: Image, *, scripts: bool, progress: Progress) -> tuple[str, ...]:
    """Return the programs in the environment's bin, from the image's layers; see `is_program`."""
    programs: set[str] = set()
    with progress.task(
        "read layers", total=sum(image_layer.descriptor.size for image_layer in image.layers)
    ) as task:
        for layer in image.layers:
            chunks: Iterator[bytes] = LayoutStore(access.layout).read("", layer.descriptor)
            try:
                _add(programs, bounded(plain_layer(layer.descriptor.media_type, chunks)), scripts=scripts)
            except CorruptDataError as error:
                raise layer_error(layer.descriptor.digest, error) from error
            task.advance(layer.descriptor.size)
    return tuple(sorted(programs))


def _add(programs: set[str], chunks: Iterator[bytes], *, scripts: bool) -> None:
    stream = TarStream(chunks)
    for entry in entries(stream):
        name = entry.path.removeprefix(BIN)
        if entry.path.startswith(BIN) and "/" not in name and entry.kind != DIRECTORY:
            head = entry.read(HEAD) if entry.kind == FILE else b""
            if entry.kind == HIDDEN and name == OPAQUE:
                programs.clear()
            elif entry.kind in (HIDDEN, REMOVED):
                programs.discard(name.removeprefix(WHITEOUT))
            elif is_program(name, head, scripts=scripts):
                programs.add(name)
    stream.drain()
