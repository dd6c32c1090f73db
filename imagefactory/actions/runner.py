"""The runner of a name, on the store and the terminal of this call."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

from imagefactory.access import Access
from imagefactory.actions.images import ensure_sif
from imagefactory.fs import user_temporary_directory
from imagefactory.progress import Progress
from imagefactory.runtime.protocol import Runner, RunnerSupport
from imagefactory.settings.choices import RUNNERS


def scratch_directory(access: Access, name: str) -> Path:
    """Where a run by that runner gets folders to write: on the store's disk, where `unshare` counts them.

    docker and apptainer may work as root, whom a store on NFS keeps out: they get it among temporary files.
    """
    return access.layout.scratch if name == "unshare" else user_temporary_directory()


def make_runner(access: Access, name: str, target: str, progress: Progress) -> Runner:
    """The runner of that row; `target` is what a .sif that has to be made is named after."""
    ground = RunnerSupport(
        layout=access.layout,
        environ=access.environ,
        progress=progress,
        workers=access.settings.worker_count,
        ensure_sif=lambda image: ensure_sif(access, image, target, progress, compression="fast"),
    )
    runner: Runner = import_module(RUNNERS[name].module).make_runner(ground)
    return runner
