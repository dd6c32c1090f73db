"""A command inside what was built, by the runner that fits; first brought to where that starts it."""

from __future__ import annotations

import contextlib
import os
import pwd
import re
from dataclasses import replace
from pathlib import Path

from imagefactory.access import Access
from imagefactory.actions.images import load_artifact, stored_image, stored_sif
from imagefactory.actions.runner import make_runner
from imagefactory.actions.transfer import local_name, pull_image
from imagefactory.build.definition import INIT
from imagefactory.errors import BuildError, NothingSelectedError
from imagefactory.model import PLAIN_START, CommandResult, ContainerStart, Mount, RunSpec, Target
from imagefactory.oci.manifests import Image, SifArtifact
from imagefactory.oci.store import DIGEST, ImageReference, check_digest, parse_reference
from imagefactory.progress import Progress
from imagefactory.runtime.emulator import emulation
from imagefactory.runtime.here import mount_current_directory, private_directories
from imagefactory.runtime.sandbox.root import mounts_below
from imagefactory.settings.choices import ENGINES, RUNNERS
from imagefactory.trust.catalog import CatalogImage
from imagefactory.trust.keys import keys_directory


def find_stored(access: Access, name: str) -> Image | SifArtifact | None:
    """The image or .sif of the store by its tag or digest (`NAME@sha256:...` too); None for a plain name.

    Raises NothingSelectedError for a tag or digest that the store lacks.
    """
    layout = access.layout
    _, at, digest = name.rpartition("@")
    if at or DIGEST.fullmatch(name):
        found = layout.manifest(check_digest(digest or name))
        if found is None:
            raise NothingSelectedError(
                "image-not-found",
                f"no image {digest or name} in {layout.path}",
                hint=_missing_image_error(name),
            )
        return load_artifact(access, name, found[0])
    tags = layout.tags()
    if name in tags:
        return load_artifact(access, name, tags[name])
    if ":" in name or "/" in name:
        raise NothingSelectedError(
            "image-not-found", f"no image '{name}' in {layout.path}", hint=_missing_image_error(name)
        )
    return None


def _missing_image_error(name: str) -> str:
    return f"run imagefactory pull {name}" if "/" in name else "see imagefactory store list"


def find_built(access: Access, target: Target, runner: str) -> Image | SifArtifact:
    """What was built of a target, for `runner`, which is empty for the setting, or for what fits.

    That is its image, or the .sif that apptainer built where there is no image or the setting `engine` is
    apptainer. Raises BuildError when nothing is built.
    """
    choice, settings = runner or access.settings.runner.value, access.settings
    made: Image | SifArtifact | None = stored_image(access, target)
    if made is None or (settings.engine.value == "apptainer" and choice in ("", "apptainer")):
        made = stored_sif(access, target) or made
    if made is None:
        raise BuildError(
            "image-not-built", f"{target.name} is not built", hint=f"run imagefactory build {target.name}"
        )
    return made


def offered_reference(offered: CatalogImage, *, sif: bool = False) -> ImageReference:
    """Where the image of a catalogue lies; with `sif` its own .sif counts where there is no image.

    Raises NothingSelectedError where no registry has it.
    """
    found = next((one.reference for one in offered.sifs if one.reference), "")
    if offered.only_sif or not offered.reference:
        if sif and found:
            return parse_reference(found)
        raise NothingSelectedError(
            "image-not-pullable",
            f"{offered.target} is {'only a .sif' if offered.sifs else 'in no registry'}",
            hint=f"run apptainer exec --nv oras://{found} COMMAND"
            if found
            else "see others with imagefactory search",
        )
    return parse_reference(offered.reference)


def fetch_offered(access: Access, offered: CatalogImage, progress: Progress) -> Image:
    """The image of a catalogue, by its digest; pulled where the store has it not yet.

    Raises NothingSelectedError where no registry has it, and as `pull_image` does.
    """
    reference = offered_reference(offered)
    name = local_name(access, reference)
    made = access.layout.image(name)
    if made is None or made.manifest != offered.subject.manifest:
        pull_image(access, reference, name, progress, platform=offered.platform)
        made = access.layout.image(name)
    if made is None:
        raise BuildError(
            "image-removed", f"another process removed {name} from the store", hint="run the command again"
        )
    return made


def own_start(made: Image | SifArtifact, target: Target | None) -> ContainerStart:
    """How a container starts as its recipe says it, or its image: `command` is whole, with the entry point.

    Empty where none says it: of the `python` that images start without a word of theirs. `user` is a number.
    """
    start = target.start if target else made.start if isinstance(made, Image) else ContainerStart()
    own = start.entrypoint[len(INIT) :] if start.entrypoint[: len(INIT)] == INIT else start.entrypoint
    command = (*own, *start.command)
    user = start.user.partition(":")[0]
    return replace(
        start,
        entrypoint=(),
        command=() if command == PLAIN_START.command else command,
        workdir="" if start.workdir == PLAIN_START.workdir else start.workdir,
        user=user if user.isdecimal() else "",
    )


def fitting_runner(access: Access, made: Image | SifArtifact, runner: str) -> str:
    """The runner that is asked for, else the setting's, else what fits."""
    fits = ENGINES[access.settings.engine.value].runner if isinstance(made, Image) else "apptainer"
    return runner or access.settings.runner.value or fits


def run_artifact(
    access: Access, made: Image | SifArtifact, spec: RunSpec, runner: str, progress: Progress
) -> CommandResult:
    """Runs a command in what the store has; `runner` is empty for the setting, or for what fits."""
    name = fitting_runner(access, made, runner)
    if isinstance(made, Image) and (how := emulation(made.architecture, own=RUNNERS[name].brings_emulator)):
        progress.note(f"{made.name}: {how}")
    with access.layout.in_use(progress):
        file = re.sub(r"[^A-Za-z0-9._-]+", "-", made.name.rpartition("/")[2])
        chosen = make_runner(access, name, file, progress)
        chosen.require()
        made = chosen.prepare(made, checked=False)
    return chosen.run(made, spec)


def mounted_directory(access: Access, folder: Path) -> tuple[Mount | None, str]:
    """What a command is shown of a folder that its caller has not mounted, and what is told of it."""
    account = ""
    with contextlib.suppress(KeyError):  # containers start users that have no account
        account = pwd.getpwuid(os.getuid()).pw_dir
    homes = [path for path in (access.environ.get("HOME"), account) if path and path != "/"]
    own = (access.layout.path, access.settings.cache_path, keys_directory(access.environ))
    runtime = access.environ.get("XDG_RUNTIME_DIR")
    private = private_directories(
        [Path(path).resolve() for path in homes or ["/root"]],
        own=[path.resolve() for path in own],
        runtime=[Path(runtime).resolve()] if runtime else [],
    )
    with Path("/proc/self/mountinfo").open("rb") as file:
        mounted = mounts_below(str(folder), file)
    readable = os.access(folder, os.R_OK | os.X_OK)
    return mount_current_directory(folder, readable=readable, private=private, mounted=mounted)
