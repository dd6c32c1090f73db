"""An image as a site's software module: a modulefile, and a wrapper for each of the image's programs. Pure.

    FOLDER/modulefiles/FAMILY/VERSION      Tcl, which Lmod and Environment Modules read alike
    FOLDER/images/TARGET-<12 digits>.sif
    FOLDER/wrappers/TARGET-<12 digits>/run, and bin/NAME, a link to it for each program

A wrapper starts the program of its own name in the image, which it finds from where it lies itself.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from imagefactory.errors import UsageError
from imagefactory.gpu.builds import platform_of, rocm_of
from imagefactory.model import Target
from imagefactory.oci.layout import reference
from imagefactory.build.definition import PREFIX

_PROGRAM = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,100}")
_SAFE = re.compile(r"[A-Za-z0-9/._+@:,=-]+")
_ELF, _SCRIPT, _PYTHON = b"\x7fELF", b"#!", b"#!/opt/env/bin/python"
HEAD = len(_PYTHON)
"""How many bytes of a file tell whether it is a program."""


def is_program(name: str, head: bytes, *, scripts: bool) -> bool:
    """Whether a file of the environment's bin that begins so gets a wrapper.

    Python does, and what is a program; with `scripts` alone what Python runs: an environment of conda has
    programs of the system too (`clear`, `xz`), and nobody wants those from there.
    """
    if not _PROGRAM.fullmatch(name):
        return False
    if name.startswith("python") or head.startswith(_PYTHON):
        return True
    return not scripts and head.startswith((_ELF, _SCRIPT))


@dataclass(frozen=True, slots=True, kw_only=True)
class Module:
    """What a module is made of: `folder` is where it lies, `image` the name of the .sif there."""

    target: Target
    folder: Path
    image: str
    programs: tuple[str, ...]

    @property
    def modulefile(self) -> PurePosixPath:
        """Its path below the folder."""
        family, _, version = reference(self.target).partition(":")
        return PurePosixPath("modulefiles", family, version)

    @property
    def wrappers(self) -> PurePosixPath:
        """The folder of the wrappers, below the folder."""
        return PurePosixPath("wrappers", self.image.removesuffix(".sif"))


def format_modulefile(module: Module) -> str:
    """Raises UsageError for a folder whose path Tcl could read as something else."""
    folder = str(module.folder)
    if not _SAFE.fullmatch(folder):
        raise UsageError(
            "option-invalid",
            f"a modulefile cannot have the directory {folder[:100]!r}",
            hint="use only letters, digits and . _ + - /, such as -o /software/imagefactory",
        )
    target = module.target
    what = f"{target.family} {target.version}, {platform_of(target.cuda)}, Python {target.python}"
    lines = [
        "#%Module1.0",
        f"# {target.name}, written by `imagefactory module`: change nothing here, write it anew.",
        f"set folder {folder}",
        f"module-whatis {{{what}: the image {module.image}}}",
        "proc ModulesHelp { } {",
        f"    puts stderr {{{what}.}}",
        f"    puts stderr {{python, and what else was installed with it, run in the image {module.image}.}}",
        "    puts stderr {Folders beside the current one: export APPTAINER_BIND=/data,/scratch}",
        "}",
        f"conflict {target.family}",
        f"prepend-path PATH $folder/{module.wrappers}/bin",
        f"setenv IMAGEFACTORY_IMAGE $folder/images/{module.image}",
    ]
    return "\n".join(lines) + "\n"


def format_wrapper(module: Module) -> str:
    """The program that all names link to."""
    target = module.target
    gpu = "--rocm" if rocm_of(target.cuda) else "--nv"
    device = "/dev/kfd" if rocm_of(target.cuda) else "/dev/nvidiactl"
    shown = f"gpu=\nif [ -e {device} ]; then gpu={gpu}; fi\n" if target.gpu else "gpu=\n"
    return (
        "#!/bin/sh\n"
        f"# Runs the program of this name in the image of {target.name}. Written by `imagefactory module`.\n"
        'here=$(dirname "$(readlink -f "$0")")\n'
        'command -v apptainer >/dev/null || { echo "${0##*/}: there is no apptainer here" >&2; exit 127; }\n'
        f"{shown}"
        "# shellcheck disable=SC2086 # no word or one\n"
        f'exec apptainer exec $gpu --env PYTHONNOUSERSITE=1 "$here/../../images/{module.image}" \\\n'
        f'    "{PREFIX}/bin/${{0##*/}}" "$@"\n'
    )
