"""The job that runs once, when all runs of a sweep are done, with their folders run-1 and so on. Pure.

HTCondor sends it the folders, as they came back, and DAGMan waits for the runs; Slurm's machines see them.
"""

from __future__ import annotations

from imagefactory.jobs.htcondor import GATHER, SubmitRun, folder_of


def gathering(run: SubmitRun, runs: int, *, sent: bool) -> SubmitRun:
    """That job, for a sweep of `run`: no GPU, one core. `sent` is whether files are sent to it."""
    return SubmitRun(
        name=f"{run.name}-{GATHER}",
        executable=run.gather,
        in_image=run.in_image,
        inputs=tuple(folder_of(number) for number in range(1, runs + 1)) if sent else (),
        gpus=0,
        memory=run.memory,
        disk=run.disk,
    )
