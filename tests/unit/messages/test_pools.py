"""The most important messages of jobs, pools, sweeps and the matrix, word by word."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest

from imagefactory.errors import ImagefactoryError
from imagefactory.extras.lint.reader import parse_submit_file
from imagefactory.jobs.offer import choose_form, forms_of
from imagefactory.matrix.plan import check_rules
from imagefactory.matrix.rows import parse_rows
from imagefactory.schedulers.cells import check_allowed, parse_tuple
from imagefactory.schedulers.htcondor.ads import parse_status
from imagefactory.schedulers.inventory import parse_inventory
from imagefactory.schedulers.pool import ImageKind, open_pool
from imagefactory.schedulers.sites import find_site
from imagefactory.schedulers.sizes import GB, parse_size
from imagefactory.schedulers.slurm.nodes import run
from imagefactory.schedulers.sweep_file import read_sweep
from tests.made.offers import NOW, job_spec, offer

GENERIC = find_site("generic")


@pytest.mark.parametrize(
    ("fails", "message", "hint"),
    [
        (
            lambda: choose_form(forms_of(offer(reference=""), ""), GENERIC, None),
            "the image is not in a registry or file, so jobs cannot fetch it",
            "run imagefactory push, or imagefactory push --format sif, in its project",
        ),
        (
            lambda: job_spec(kind=ImageKind.DOCKER, disk=GB),
            "the image needs more than the requested 1GB of disk",
            "use --disk 13GB or more, or remove it",
        ),
        (
            lambda: job_spec(site="slurm", gpu_memory=1),
            "--gpu-memory does not work with Slurm, which cannot select GPUs by memory",
            "remove --gpu-memory, and write the GPU type into the script: --gres=gpu:TYPE:1",
        ),
        (
            lambda: find_site("ospool").lines(timedelta(hours=21)),
            "the OSPool does not run jobs longer than 20 hours",
            "write checkpoints and split the job into shorter ones",
        ),
        (
            lambda: find_site("nowhere"),
            "unknown site 'nowhere'",
            "sites: chtc, ospool, igwn, generic, slurm, kubernetes",
        ),
        (lambda: parse_size("lots"), "'lots' is not a size", "write a number and its unit: 8GB"),
        (
            lambda: list(parse_status("{}")),
            "condor_status did not print a JSON list",
            "run condor_status -json and check its output",
        ),
        (
            lambda: parse_inventory("3", "pool.json", NOW),
            'pool.json: "3" is not a valid value',
            "write an object with format, pool, taken, machines, notes",
        ),
        (lambda: open_pool("pbs", {}), "unknown pool 'pbs'", "pools: htcondor, slurm"),
        (
            lambda: run(["squeue"], {"PATH": ""}),
            "squeue is not installed on this machine",
            "run this on a login node of the cluster, or use --inventory FILE",
        ),
        (
            lambda: parse_submit_file("#!/bin/sh\n", "a.sub"),
            "a.sub:1: this is a script, not a submit file",
            "imagefactory job write TARGET --site slurm writes a batch script, which has #SBATCH lines",
        ),
        (
            lambda: check_allowed(["no-match"]),
            "--ignore-rule no-match: no GPU in this pool can run such a job",
            "remove --ignore-rule no-match",
        ),
        (lambda: check_rules(["nocode"]), "--ignore-rule nocode: unknown rule", "did you mean 'no-code'?"),
        (
            lambda: read_sweep(Path("/nowhere")),
            "/nowhere is not a sweep",
            "list the sweeps of this store: imagefactory sweep list",
        ),
        (
            lambda: parse_tuple("torch", "2.x", "12.1", "8.0"),
            "--version: '2.x' is not a version",
            "write 2.3",
        ),
        (
            lambda: parse_rows("framework,version,cuda\n", "space.csv"),
            "space.csv:1: the column capability is missing",
            "write the header framework,version,cuda,capability; driver and outcome are optional",
        ),
    ],
)
def test_messages(fails: Callable[[], object], message: str, hint: str) -> None:
    with pytest.raises(ImagefactoryError) as caught:
        fails()
    assert (caught.value.message, caught.value.hint) == (message, hint)
    assert caught.value.code
