"""A command inside what was built, by the runner that fits; first brought to where that starts it."""

from __future__ import annotations

from importlib import import_module

from imagefactory.access import Access
from imagefactory.errors import BuildError
from imagefactory.model import Completed, RunSpec, Target
from imagefactory.oci.model import Image, Sif
from imagefactory.progress import Progress
from imagefactory.runners.protocol import Runner, RunnerGround
from imagefactory.settings.choices import ENGINES, RUNNERS
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
    name = choice or (ENGINES[settings.engine.value].runner if isinstance(made, Image) else "apptainer")
    with access.layout.in_use(progress):
        chosen = make_runner(access, name, target.name, progress)
        chosen.require()
        made = chosen.prepare(made, checked=False)
    return chosen.run(made, spec)
