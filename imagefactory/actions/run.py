"""Run a command in an image, with a suitable runner."""

from __future__ import annotations

import contextlib
import os
import pwd
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from imagefactory.access import Access
from imagefactory.actions.images import make_runner, not_built_error, require_image, stored_image, stored_sif
from imagefactory.actions.transfer import local_name, pull_image
from imagefactory.build.definition import INIT
from imagefactory.errors import NothingSelectedError
from imagefactory.model import PLAIN_START, CommandResult, ContainerStart, Mount, RunSpec, Target
from imagefactory.oci.manifests import Image, SifArtifact
from imagefactory.oci.store import ImageReference, parse_reference
from imagefactory.progress import Progress
from imagefactory.runtime.emulator import emulation
from imagefactory.runtime.sandbox.root import mounts_below
from imagefactory.settings.choices import ENGINES, RUNNERS
from imagefactory.trust.catalog import CatalogImage
from imagefactory.trust.keys import keys_directory


def find_built(access: Access, target: Target, runner: str) -> Image | SifArtifact:
    """Return a target's image, or its .sif by Apptainer if there is no image or the runner supports both.

    `runner` is empty for the setting, or for a suitable one. Raises BuildError if nothing is built.
    """
    settings = access.settings
    artifact: Image | SifArtifact | None = stored_image(access, target)
    apptainer = (runner or settings.runner.value) in ("", "apptainer")
    if artifact is None or (settings.engine.value == "apptainer" and apptainer):
        artifact = stored_sif(access, target) or artifact
    if artifact is None:
        raise not_built_error(target)
    return artifact


def offered_reference(offered: CatalogImage, *, sif: bool = False) -> ImageReference:
    """Return the reference of a catalog's image. With `sif` that of its .sif, if there is no image.

    Raises NothingSelectedError if no registry has the image.
    """
    if offered.reference and not offered.only_sif:
        return parse_reference(offered.reference)
    reference = next((row.reference for row in offered.sifs if row.reference), "")
    if sif and reference:
        return parse_reference(reference)
    hint = "to see other images, run imagefactory search"
    if offered.sifs:
        hint = f"use it in a job: imagefactory job write {offered.target}"
    if reference:
        hint = f"run apptainer exec --nv oras://{reference} COMMAND"
    problem = "only a .sif" if offered.sifs else "in no registry"
    raise NothingSelectedError("image-not-pullable", f"{offered.target} is {problem}", hint=hint)


def fetch_offered(access: Access, offered: CatalogImage, progress: Progress) -> Image:
    """Return the image of a catalog, pulled by digest if the store lacks it.

    Raises NothingSelectedError if no registry has the image, and the errors of `pull_image`.
    """
    reference = offered_reference(offered)
    name = local_name(access, reference)
    image = access.layout.image(name)
    if image is not None and image.manifest == offered.subject.manifest:
        return image
    pull_image(access, reference, name, progress, platform=offered.platform)
    return require_image(access, name)


def own_start(artifact: Image | SifArtifact, target: Target | None) -> ContainerStart:
    """Return the container start in the recipe, else in the image. `command` contains the entry point.

    It is empty if neither sets a start, also for the default `python`. `user` is a number.
    """
    start = target.start if target else artifact.start if isinstance(artifact, Image) else ContainerStart()
    entrypoint = start.entrypoint[len(INIT) :] if start.entrypoint[: len(INIT)] == INIT else start.entrypoint
    command = (*entrypoint, *start.command)
    user = start.user.partition(":")[0]
    return replace(
        start,
        entrypoint=(),
        command=() if command == PLAIN_START.command else command,
        workdir="" if start.workdir == PLAIN_START.workdir else start.workdir,
        user=user if user.isdecimal() else "",
    )


def fitting_runner(access: Access, artifact: Image | SifArtifact, runner: str) -> str:
    """Return the requested runner, else the one of the setting, else a suitable one."""
    fits = ENGINES[access.settings.engine.value].runner if isinstance(artifact, Image) else "apptainer"
    return runner or access.settings.runner.value or fits


def run_artifact(
    access: Access, artifact: Image | SifArtifact, spec: RunSpec, runner: str, progress: Progress
) -> CommandResult:
    """Run a command in an image or .sif of the store."""
    name = fitting_runner(access, artifact, runner)
    if isinstance(artifact, Image) and (
        how := emulation(artifact.architecture, include_own=RUNNERS[name].brings_emulator)
    ):
        progress.note(f"{artifact.name}: {how}")
    with access.layout.in_use(progress):
        file = re.sub(r"[^A-Za-z0-9._-]+", "-", artifact.name.rpartition("/")[2])
        program = make_runner(access, name, file, progress)
        program.require()
        artifact = program.prepare(artifact, checked=False)
    return program.run(artifact, spec)


def mounted_directory(access: Access, directory: Path) -> tuple[Mount | None, str]:
    """Return the mount of a directory that the caller has not mounted, and a note on it."""
    account = ""
    with contextlib.suppress(KeyError):  # in a container the user may have no account
        account = pwd.getpwuid(os.getuid()).pw_dir
    homes = [path for path in (access.environ.get("HOME"), account) if path and path != "/"]
    private_paths = (access.layout.path, access.settings.cache_path, keys_directory(access.environ))
    runtime = access.environ.get("XDG_RUNTIME_DIR")
    private = private_directories(
        [Path(path).resolve() for path in homes or ["/root"]],
        own_directories=[path.resolve() for path in private_paths],
        runtime=[Path(runtime).resolve()] if runtime else [],
    )
    with Path("/proc/self/mountinfo").open("rb") as file:
        mounted = mounts_below(str(directory), file)
    readable = os.access(directory, os.R_OK | os.X_OK)
    return mount_current_directory(directory, readable=readable, private=private, mounted=mounted)


# --- the current directory of a run

WORKDIR = "/work"
"""The path of the current directory in an image. Its own path could hide a directory of the image."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrivateDirectory:
    """A directory that no image sees by default, nor its parents. With `below` nor its subdirectories."""

    path: Path
    name: str
    below: bool = True


SYSTEM_PLACES = (
    *(
        PrivateDirectory(path=Path(path), name="a system directory")
        for path in ("/run", "/var/run", "/dev", "/proc", "/sys", "/etc", "/boot", "/root")
    ),
    *(
        PrivateDirectory(path=Path(path), name="a directory of all users", below=False)
        for path in ("/tmp", "/var/tmp")  # noqa: S108 - the places themselves, no file in them
    ),
)


def private_directories(
    homes: Sequence[Path], *, own_directories: Sequence[Path], runtime: Sequence[Path]
) -> tuple[PrivateDirectory, ...]:
    """Return the caller's homes, imagefactory's own directories, those of running programs and the system's.

    A home in a system directory, such as /root, is treated like other homes.
    """
    return (
        *(PrivateDirectory(path=path, name="your home", below=False) for path in homes),
        *(PrivateDirectory(path=path, name="a directory of imagefactory itself") for path in own_directories),
        *(PrivateDirectory(path=path, name="a directory of running programs") for path in runtime),
        *(
            replace(
                directory,
                below=directory.below and not any(home.is_relative_to(directory.path) for home in homes),
            )
            for directory in SYSTEM_PLACES
        ),
    )


def mount_current_directory(
    directory: Path, *, readable: bool, private: Sequence[PrivateDirectory], mounted: Sequence[str] = ()
) -> tuple[Mount | None, str]:
    """Return the mount of the current directory, or None, with a message.

    `readable` is true if the caller may list and enter the directory. `mounted` are the mount points in it.
    """
    reason = _hidden_reason(directory, private)
    if mounted:
        reason = reason or f"contains {mounted[0]}, where another disk is mounted,"
    if not readable:
        reason = "cannot be read by you"
    if reason:
        return (
            None,
            f"{directory} {reason} and is not mounted; to mount another directory: --mount DIR:{WORKDIR} "
            f"--workdir {WORKDIR}",
        )
    return Mount(source=directory, target=WORKDIR), (
        f"{directory} is {WORKDIR} inside, read-only; "
        f"to write there: --mount .:{WORKDIR}:rw --workdir {WORKDIR}"
    )


def _hidden_reason(folder: Path, private: Sequence[PrivateDirectory]) -> str:
    for directory in private:
        if folder == directory.path:
            return f"is {directory.name}"
        if directory.path.is_relative_to(folder):
            return f"contains {directory.path}"
        if directory.below and folder.is_relative_to(directory.path):
            return f"is in {directory.path} ({directory.name})"
    hidden = next((part for part in folder.parts if part.startswith(".")), "")
    return f"is in a hidden directory ({hidden})" if hidden else ""
