"""How many GPUs a job can get and how many are free, by values alone; as HTCondor's expressions have it."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from imagefactory.extras.lint.image import read_image
from imagefactory.extras.lint.reach import find_reach, read_request
from imagefactory.extras.lint.reader import parse_submit_file
from imagefactory.jobs.htcondor import JobImageSpec, SubmitCommand, format_submit
from imagefactory.jobs.make import SubmitFiles, resource_request
from imagefactory.jobs.offer import (
    ResourceRequest,
    by_class,
    find_places,
    format_places,
    forms_of,
    index_machines,
)
from imagefactory.schedulers.pool import Inventory, PoolGpu, PoolMachine
from imagefactory.schedulers.sites import find_site
from imagefactory.schedulers.sizes import GB, MB
from tests.made.offers import NOW, gpu_class, offer, verdict

HAS = {"Arch": "X86_64", "HasDockerURL": True, "HasSIF": True, "Memory": 515000, "Cpus": 64, "Disk": 1 << 30}


def gpu(capability: str = "8.0", **more: Any) -> PoolGpu:
    given: dict[str, Any] = {
        "id": "GPU-a0223334", "uuid": "", "name": "NVIDIA A100-SXM4-40GB", "capability": capability,
        "memory": 40 * GB, "driver": "", "cuda": "12.4", "mig": False, "free": True, "host": "amd64",
    }  # fmt: skip
    return PoolGpu(**{**given, **more})


def machine(*gpus: PoolGpu, start: str = "true", **attributes: Any) -> PoolMachine:
    return PoolMachine(name="a", attributes={**HAS, **attributes}, start=start, gpus=gpus)


def inventory(*machines: PoolMachine, taken: datetime = NOW) -> Inventory:
    return Inventory(pool="", taken=taken, machines=machines)


def told(*machines: PoolMachine, now: datetime = NOW, taken: datetime = NOW, **wish: Any) -> str:
    there = inventory(*machines, taken=taken)
    found = find_places(
        by_class([gpu_class("8.0"), gpu_class("9.0", "12.8")]), ResourceRequest(**wish), index_machines(there)
    )
    return format_places(found, there, now)


def test_how_many_and_how_many_are_free() -> None:
    busy = gpu(free=False)
    assert told(machine(gpu(), busy), machine(gpu("7.0"))) == "reaches 2 of 3 GPUs, 1 free now"
    assert told(machine(gpu("7.0"))) == "reaches 0 of 1 GPU, 0 free now"
    assert told(machine(gpu("9.0"), gpu("9.0", cuda="12.8"))) == "reaches 1 of 2 GPUs, 1 free now"


def test_of_two_at_once_both_must_be_there_and_free() -> None:
    busy = gpu(free=False)
    assert told(machine(gpu()), machine(gpu()), gpus=2) == "reaches 0 of 2 GPUs, 0 free now"
    assert told(machine(gpu(), busy), gpus=2) == "reaches 2 of 2 GPUs, 0 free now"
    assert told(machine(gpu(), gpu(), busy), gpus=2) == "reaches 3 of 3 GPUs, 2 free now"


@pytest.mark.parametrize(
    ("there", "wish", "reached"),
    [
        (machine(gpu(memory=40 * GB - MB)), {"gpu_memory": 40 * GB}, 0),
        (machine(gpu(memory=0)), {"gpu_memory": 1}, 0),
        (machine(gpu(memory=0)), {}, 1),
        (machine(gpu(mig=True)), {}, 0),
        (machine(gpu(mig=True)), {"mig": True}, 1),
        (machine(gpu(cuda="")), {}, 0),
        (machine(gpu(host="arm64"), Arch="aarch64"), {}, 0),
        (machine(gpu(host="arm64"), Arch="aarch64"), {"platform": "linux/arm64"}, 1),
        (machine(gpu()), {"memory": 515001 * MB}, 0),
        (machine(gpu()), {"cpus": 65}, 0),
        (machine(gpu()), {"disk": 2**40 + 1}, 0),
        (machine(gpu()), {"needs": ("HasDockerURL",)}, 1),
        (machine(gpu()), {"needs": ("HasCHTCStaging",)}, 0),
        (machine(gpu(), HasDockerURL="true"), {"needs": ("HasDockerURL",)}, 0),
    ],
)
def test_what_keeps_a_job_away(there: PoolMachine, wish: dict[str, Any], reached: int) -> None:
    assert told(there, **wish).startswith(f"reaches {reached} of 1 GPU")


def test_what_is_not_told_is_unsure() -> None:
    unsure = "reaches 1 of 1 GPU, 1 free now (of 1 of them the machines may refuse)"
    assert told(machine(gpu(), start="Owner == 'me'")) == unsure
    bare = PoolMachine(name="a", attributes={}, start="", gpus=(gpu(host=""),))
    assert told(bare, needs=("HasSIF",)) == unsure
    assert "refuse" not in told(bare)


def test_an_inventory_says_when_it_was() -> None:
    then = NOW + timedelta(hours=1)
    assert told(machine(gpu()), now=then) == "reaches 1 of 1 GPU, 1 free at 2026-11-22 06:00 UTC"
    assert told(machine(gpu()), taken=datetime(1970, 1, 1, tzinfo=UTC)) == "reaches 1 of 1 GPU"


GPUS = st.builds(
    gpu,
    st.sampled_from(("7.0", "8.0", "8.6", "9.0", "12.0")),
    memory=st.sampled_from((8 * GB, 40 * GB)),
    cuda=st.sampled_from(("", "11.8", "12.4", "12.8", "13.0")),
)
MACHINES = st.builds(
    lambda gpus, attributes: machine(*gpus, **attributes),
    st.lists(GPUS, min_size=1, max_size=4),
    st.fixed_dictionaries(
        {"Memory": st.sampled_from((2000, 515000)), "HasDockerURL": st.booleans(), "Cpus": st.integers(1, 4)}
    ),
)


@given(st.lists(MACHINES, max_size=4), st.integers(1, 3), st.sampled_from((0, 24 * GB)), st.integers(1, 4))
def test_it_is_what_the_check_of_the_written_file_finds(
    machines: list[PoolMachine], gpus: int, memory: int, cpus: int
) -> None:
    site, there = find_site("generic"), inventory(*machines)
    classes = (gpu_class("8.0"), gpu_class("8.6", "12.0"), gpu_class("9.0", "12.8"))
    form = forms_of(offer(verdict("8.0")), "")[0]
    run = SubmitCommand(name="a", executable="a.sh", gpus=gpus, gpu_memory=memory, cpus=cpus)
    taken = JobImageSpec(target="a", platform="linux/amd64", form=form, classes=classes, judged=NOW)
    text = format_submit(taken, run, site)
    (jobs,) = parse_submit_file(text, "a.sub").jobs
    image = read_image(jobs)
    assert image is not None
    reach = find_reach(read_request(jobs, (image.needs,)), there)
    found = find_places(
        by_class(classes),
        resource_request(SubmitFiles(taken=taken, run=run, text=text), site),
        index_machines(there),
    )
    assert [place.gpu for place in found] == [place.gpu for place in reach.reached]
    assert not any(place.unsure for place in found)
