"""What `job check` says of where jobs get, beside what HTCondor makes of the same file on a real pool.

`condor_submit -dry-run` writes the job, `condor_status -long` the slots; the two match as the negotiator has
it, each one's Requirements true for the other. The GPUs are simulated, and nothing runs.
"""

from __future__ import annotations

from pathlib import Path

import classad2
import htcondor2  # noqa: F401 - HTCondor's own functions of the language
import pytest

from imagefactory.extras.lint.check import check_submit_file
from imagefactory.extras.lint.findings import CheckContext
from imagefactory.extras.lint.reader import read_submit_file
from imagefactory.schedulers.inventory import read_inventory
from imagefactory.schedulers.sites import find_site
from imagefactory.trust.catalog import ImageOffer
from tests.services.condor import MACHINES as EVERY
from tests.services.condor import CondorPool

PINNED = "docker://registry.example.org/gpu/torch@sha256:" + "a" * 64
FILES = {
    "all": "",
    "capability": "gpus_minimum_capability = 7.5\ngpus_maximum_capability = 8.0",
    "holes": "require_gpus = member(Capability, {7.0, 9.0})",
    "cancelled": "require_gpus = Capability == 8.0\ngpus_minimum_capability = 9.0",
    "in part cancelled": "require_gpus = Capability >= 7.5\ngpus_minimum_runtime = 12.4",
    "driver": "require_gpus = DriverVersion >= 12.3",
    "runtime": "gpus_minimum_runtime = 12.3",
    "memory": "gpus_minimum_memory = 20GB",
    "name": 'require_gpus = DeviceName == "a100-sxm4-40gb"',
    "of the machine": "require_gpus = OpSysMajorVer >= 1 && Capability > 7.0",
    "of the job": "+MyLeast = 7.2\nrequire_gpus = Capability >= MyLeast",
    "target": "require_gpus = TARGET.Capability >= 7.0",
    "flat": "requirements = GPUs_Capability >= 8.0",
    "old": "requirements = CUDACapability >= 7.0",
    "cuda_version": "cuda_version = 11.0",
    "machine": 'requirements = regexp("^a", Machine)',
    "macro": "least = 8\nrequirements = TARGET.GPUs_Capability >= $(least:7).0",
    "two": "request_gpus = 2",
    "memory of the machine": "request_memory = 900GB",
    "memory of the last run": "request_memory = ifThenElse(MemoryUsage =!= undefined, MemoryUsage * 2, 2048)",
    "not the last machine": 'requirements = Machine =!= MachineAttrMachine1 && Machine != "a100.pool.test"',
    "no slice": 'require_gpus = regexp(" mig ", DeviceName, "i") =!= true',
    "docker": f"universe = container\ncontainer_image = {PINNED}",
    "oras": f"universe = container\ncontainer_image = {PINNED.replace('docker:', 'oras:')}",
    "sif": "universe = container\ncontainer_image = torch-0123456789ab.sif",
    "docker universe": f"universe = docker\ndocker_image = {PINNED.removeprefix('docker://')}",
}


@pytest.fixture(scope="module")
def folder(pool: CondorPool) -> Path:
    made = pool.home / "checked"
    made.mkdir()
    (made / "run.sh").write_text("#!/bin/sh\n")
    (made / "run.sh").chmod(0o755)
    (made / "torch-0123456789ab.sif").write_bytes(b"no image: nothing runs it\n")
    pool.own(made)
    return made


@pytest.fixture(scope="module")
def slots(pool: CondorPool, folder: Path) -> list[classad2.ClassAd]:
    text = pool.run(["condor_status", "-long", "-constraint", "TotalGPUs > 0 && DynamicSlot =!= true"]).stdout
    pool.imagefactory("gpus", "-o", "inventory.json", folder=folder)
    found = list(classad2.parseAds(text, classad2.ParserType.Old))
    assert len(found) > 2
    return found


@pytest.mark.parametrize("name", FILES)
def test_it_reaches_what_htcondor_matches(
    name: str, pool: CondorPool, folder: Path, slots: list[classad2.ClassAd]
) -> None:
    file = folder / f"{name.replace(' ', '-')}.sub"
    file.write_text(f"executable = run.sh\nlog = a.log\nrequest_gpus = 1\n{FILES[name]}\nqueue\n")
    pool.own(file)
    dry = pool.run(["condor_submit", "-dry-run", "-", file.name], folder=folder).stdout
    job = classad2.parseOne(dry[dry.index("\n") + 1 :], classad2.ParserType.Old)
    assert "Requirements" in job
    matching = sorted(str(slot["Machine"]) for slot in slots if slot.symmetricMatch(job))

    around = CheckContext(
        site=find_site("generic"),
        inventory=read_inventory(folder / "inventory.json"),
        catalog=None,
        offer=lambda image: ImageOffer(image=image, judged=()),
    )
    (queue,) = check_submit_file(read_submit_file(file), around).jobs
    assert queue.gpus == len(matching), (matching, queue)
    kinds = sorted({f"{slot['GPUs_Capability']:.1f}" for slot in slots if slot["Machine"] in matching})
    assert sorted(one.capability for one in queue.reached) == kinds


def test_a_researcher_checks_an_old_file(pool: CondorPool, folder: Path) -> None:
    file = folder / "old.sub"
    lines = "universe = docker\ndocker_image = someone/torch:1.9\nrequirements = CUDACapability >= 7.0"
    file.write_text(f"executable = run.sh\n{lines}\nrequest_gpus = 1\nqueue\n")
    pool.own(file)
    own = {"XDG_CONFIG_HOME": "/nowhere"}  # whatever catalog another test's researcher has set
    done = pool.imagefactory("job", "check", "old.sub", folder=folder, code=9, **own)
    assert "old.sub:3: advice: '1.9' is a tag" in done.stdout
    assert "old.sub:4: wrong: CUDACapability is only on old machines" in done.stdout
    assert f"each matches 0 of {len(EVERY)} GPUs of this cluster" in done.stdout
    right = folder / "right.sub"
    right.write_text(
        f"executable = run.sh\ncontainer_image = {PINNED}\nrequest_gpus = 1\n"
        "gpus_minimum_capability = 8.0\ngpus_maximum_capability = 8.0\nqueue\n"
    )
    pool.own(right)
    done = pool.imagefactory("job", "check", "right.sub", folder=folder, **own)
    assert f"each matches 1 of {len(EVERY)} GPUs of this cluster" in done.stdout
