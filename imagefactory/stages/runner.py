"""The runner of a name, on the store and the terminal of this call."""

from __future__ import annotations

from importlib import import_module

from imagefactory.access import Access
from imagefactory.progress import Progress
from imagefactory.runners.protocol import Runner, RunnerGround
from imagefactory.settings.choices import RUNNERS
from imagefactory.stages.stored import ensure_sif


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
