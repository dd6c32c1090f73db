"""A command inside what was built, by the runner that fits; first brought to where that starts it."""

from __future__ import annotations

from collections.abc import Callable

from imagefactory.access import Access
from imagefactory.errors import BuildError
from imagefactory.model import Completed, RunSpec, Target
from imagefactory.oci.model import Image, Sif
from imagefactory.oci.unpack import Unpacked
from imagefactory.progress import Progress
from imagefactory.runners.apptainer import ApptainerRunner
from imagefactory.runners.apptainer_command import ApptainerCommand
from imagefactory.runners.docker import DockerRunner
from imagefactory.runners.docker_daemon import DockerDaemon, run_name
from imagefactory.runners.protocol import Runner
from imagefactory.runners.unshare import UnshareRunner
from imagefactory.settings.choices import ENGINES, RUNNERS
from imagefactory.stages.stored import ensure_sif, stored_image, stored_sif


def make_runner(access: Access, name: str, target: str, progress: Progress) -> Runner:
    """The runner called `name`; `target` is what a .sif that has to be made is named after."""
    layout, environ = access.layout, access.environ
    makers: dict[str, Callable[[], Runner]] = {
        "unshare": lambda: UnshareRunner(layout, progress=progress),
        "docker": lambda: DockerRunner(layout, DockerDaemon(environ), progress=progress),
        "apptainer": lambda: ApptainerRunner(
            ApptainerCommand(environ),
            lambda image: ensure_sif(access, image, target, progress, compression="fast"),
        ),
    }
    assert tuple(makers) == tuple(RUNNERS)
    return makers[name]()


def run_target(access: Access, target: Target, spec: RunSpec, runner: str, progress: Progress) -> Completed:
    """Runs a command in what was built of a target.

    That is its image, or the .sif that apptainer built where there is no image or the setting `engine` is
    apptainer. `runner` is empty for the setting, or for what fits. Raises BuildError when nothing is built.
    """
    wanted, settings = runner or access.settings.runner.value, access.settings
    made: Image | Sif | None = stored_image(access, target)
    if made is None or (settings.engine.value == "apptainer" and wanted in ("", "apptainer")):
        made = stored_sif(access, target) or made
    if made is None:
        raise BuildError(f"{target.name} is not built yet", hint=f"imagefactory build {target.name}")
    name = wanted or (ENGINES[settings.engine.value].runner if isinstance(made, Image) else "apptainer")
    with access.layout.in_use(progress):
        chosen, made = ready_runner(access, made, name, target.name, progress)
    return chosen.run(made, spec)


def ready_runner(
    access: Access, made: Image | Sif, name: str, target: str, progress: Progress
) -> tuple[Runner, Image | Sif]:
    """The runner called `name`, and `made` as it starts it, brought to where it starts things from.

    The caller holds the layout's `in_use`. Raises ToolError where that runner cannot run here.
    """
    runner = make_runner(access, name, target, progress)
    runner.require()
    if name == "unshare" and isinstance(made, Image):
        unpack_image(access, made, progress)
    elif name == "apptainer" and isinstance(made, Image):
        made = ensure_sif(access, made, target, progress, compression="fast")
    elif name == "docker" and isinstance(made, Image):
        # Here, where no collection can take what the daemon is still loading.
        DockerDaemon(access.environ).ensure(access.layout, made, run_name(made), progress)
    return runner, made


def unpack_image(access: Access, image: Image, progress: Progress) -> None:
    """Unpacks what is missing of `image`, layer by layer, shared between images."""
    layout = access.layout
    workers = access.settings.worker_count
    Unpacked(layout.path / "unpacked").unpack(image.layers, layout.blob_path, progress, workers=workers)
