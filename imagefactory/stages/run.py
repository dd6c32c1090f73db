"""A command inside what was built, by the runner that fits; first brought to where that starts it."""

from __future__ import annotations

from importlib import import_module

from imagefactory.access import Access
from imagefactory.catalogue.model import CataloguedImage
from imagefactory.errors import BuildError, NothingSelectedError
from imagefactory.model import Completed, RunSpec, Target
from imagefactory.oci.model import Image, Sif
from imagefactory.oci.store import parse_reference
from imagefactory.progress import Progress
from imagefactory.runners.protocol import Runner, RunnerGround
from imagefactory.settings.choices import ENGINES, RUNNERS
from imagefactory.stages.pull import local_name, pull_image
from imagefactory.stages.stored import ensure_sif, stored_image, stored_sif


def make_runner(access: Access, name: str, target: str, progress: Progress) -> Runner:
    """The runner of that row; `target` is what a .sif that has to be made is named after."""
    ground = RunnerGround(
        layout=access.layout,
        environ=access.environ,
        progress=progress,
        workers=access.settings.worker_count,
        ensure_sif=lambda image: ensure_sif(access, image, target, progress, compression="fast"),
    )
    runner: Runner = import_module(RUNNERS[name].module).make_runner(ground)
    return runner


def run_target(access: Access, target: Target, spec: RunSpec, runner: str, progress: Progress) -> Completed:
    """Runs a command in what was built of a target.

    That is its image, or the .sif that apptainer built where there is no image or the setting `engine` is
    apptainer. `runner` is empty for the setting, or for what fits. Raises BuildError when nothing is built.
    """
    choice, settings = runner or access.settings.runner.value, access.settings
    made: Image | Sif | None = stored_image(access, target)
    if made is None or (settings.engine.value == "apptainer" and choice in ("", "apptainer")):
        made = stored_sif(access, target) or made
    if made is None:
        raise BuildError(f"{target.name} is not built yet", hint=f"imagefactory build {target.name}")
    return _run(access, (made, target.name), spec, choice, progress)


def run_offered(
    access: Access, offered: CataloguedImage, spec: RunSpec, runner: str, progress: Progress
) -> Completed:
    """Runs a command in an image of a catalogue, by its digest; pulled where the store has it not yet.

    Raises NothingSelectedError where no registry has it, and as `pull_image` does.
    """
    if offered.only_sif or not offered.reference:
        sif = next((one.reference for one in offered.sifs if one.reference), "")
        raise NothingSelectedError(
            f"{offered.target} is {'a .sif alone' if offered.sifs else 'in no registry'}",
            hint=f"apptainer exec --nv oras://{sif} COMMAND" if sif else "imagefactory find shows others",
        )
    reference = parse_reference(offered.reference)
    name = local_name(access, reference)
    made = access.layout.image(name)
    if made is None or made.manifest != offered.subject.manifest:
        pull_image(access, reference, name, progress)
        made = access.layout.image(name)
    if made is None:
        raise BuildError(f"{name} was removed from the store meanwhile", hint="run it again")
    return _run(access, (made, offered.target), spec, runner or access.settings.runner.value, progress)


def _run(
    access: Access, what: tuple[Image | Sif, str], spec: RunSpec, choice: str, progress: Progress
) -> Completed:
    made, target = what
    default = ENGINES[access.settings.engine.value].runner if isinstance(made, Image) else "apptainer"
    name = choice or default
    with access.layout.in_use(progress):
        chosen = make_runner(access, name, target, progress)
        chosen.require()
        made = chosen.prepare(made, checked=False)
    return chosen.run(made, spec)
