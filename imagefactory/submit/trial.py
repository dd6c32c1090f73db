"""What runs where a person names no program, and what a job in an image for CPUs alone may ask. Pure."""

from __future__ import annotations

from dataclasses import replace

from imagefactory.errors import UsageError
from imagefactory.build.definition import PREFIX
from imagefactory.jobs.htcondor import SubmitRun
from imagefactory.suite import table

PYTHON = f"{PREFIX}/bin/python"
_TRIALS = {
    "torch": "import torch; print(torch.__version__, torch.cuda.get_device_name())",
    "tensorflow": "import tensorflow as tf; print(tf.__version__, tf.config.list_physical_devices('GPU'))",
    "jax": "import jax; print(jax.__version__, jax.devices('gpu'))",
}
_PLAIN = "import sys; print(sys.version)"


def first_trial(run: SubmitRun, framework: str) -> SubmitRun:
    """Without a program of one's own: the framework says which GPU it sees, on CPUs its version."""
    said = _TRIALS.get(framework, _PLAIN)
    if not run.gpus:
        module = table.module_of(framework)
        known = framework in table.FRAMEWORKS
        said = f"import {module}; print({module}.__name__, {module}.__version__)" if known else _PLAIN
    return replace(run, executable=PYTHON, in_image=True, arguments=("-c", said))


def without_gpus(run: SubmitRun, target: str) -> SubmitRun:
    """The run on CPUs. Raises UsageError for one that asks for more than the one GPU that is usual."""
    for option, asked in (("--gpus", run.gpus > 1), ("--gpu-memory", run.gpu_memory), ("--mig", run.mig)):
        if asked:
            raise UsageError(
                "option-conflict",
                f"{target} is for CPUs only, but {option} requests GPUs",
                hint=f"remove {option}",
            )
    return replace(run, gpus=0)
