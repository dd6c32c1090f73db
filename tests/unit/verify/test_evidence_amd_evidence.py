"""The identity of AMD's GPUs, read on a made machine; and a run of the suite that met one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from imagefactory.runtime.hardware import Places, lost_gpus
from imagefactory.verify.evidence import AmdPlaces, LocalEvidence, read_amd
from imagefactory.verify.gpu_run import assigned_gpus, choose_gpus, visible_gpus
from imagefactory.verify.report import EVIDENCE_LOCAL
from tests.made.amd import MINOR, UNIQUE, make_amd_machine
from tests.made.errors import fails
from tests.made.verdicts import HOST

UUID = f"GPU-{UNIQUE:016x}"


@pytest.fixture
def places(tmp_path: Path) -> AmdPlaces:
    make_amd_machine(tmp_path, 0, 90010)
    root = tmp_path
    return AmdPlaces(dev=root / "dev", proc=root / "proc", sys=root / "sys", release="6.8.0-45-generic")


def test_the_kernel_tells_all_of_it(places: AmdPlaces) -> None:
    found = read_amd(places)
    assert found is not None
    (gpu,) = found.gpus
    assert (gpu.name, gpu.capability, gpu.uuid) == ("AMD Instinct MI250X", "gfx90a", UUID)
    assert (gpu.memory, found.known, found.nodes) == (64 << 30, (UUID,), (f"/dev/dri/renderD{MINOR}",))
    assert (found.kind, found.driver, found.notes) == (
        EVIDENCE_LOCAL,
        "6.8.0",
        (("amdgpu", "the kernel's own"),),
    )
    assert found.gpu_of(UUID) == gpu


def test_a_driver_beside_the_kernel_tells_its_version(places: AmdPlaces) -> None:
    make_amd_machine(places.sys.parent, 0, 90010, driver="6.12.12")
    found = read_amd(places)
    assert found is not None
    assert (found.driver, found.notes) == ("6.12.12", ())


def test_ways_that_do_not_agree_are_no_gpu(places: AmdPlaces) -> None:
    (places.sys / f"class/drm/renderD{MINOR}/device/unique_id").write_text("00000000deadbeef\n")
    with fails("gpu-not-visible") as caught:
        read_amd(places)
    assert f" ids of renderD{MINOR}" in caught.value.message
    make_amd_machine(places.sys.parent, 0, 90010)
    (places.dev / f"dri/renderD{MINOR}").unlink()
    (places.dev / f"dri/renderD{MINOR}").write_text("")
    with fails("gpu-not-visible") as caught:
        read_amd(places)
    assert "render node" in caught.value.message


def test_a_gpu_without_an_id_does_not_lose_the_others(places: AmdPlaces) -> None:
    make_amd_machine(places.sys.parent, 0, 100306, 90010)
    folder = places.sys / "class/kfd/kfd/topology/nodes/1/properties"
    folder.write_text(folder.read_text().replace(f"unique_id {UNIQUE}", "unique_id 0"))
    found = read_amd(places)
    assert found is not None
    assert [gpu.uuid for gpu in found.gpus] == [UUID]
    assert list(lost_gpus(dict(found.notes))) == [0]


def test_a_machine_with_neither_says_so(tmp_path: Path, places: AmdPlaces) -> None:
    nothing = Places(dev=str(tmp_path / "none"), proc=str(tmp_path / "none"))
    evidence = LocalEvidence(places=nothing, amd=places)
    assert evidence.read().gpus[0].uuid == UUID
    with fails("gpu-not-visible"):
        replace(evidence, amd=replace(places, sys=tmp_path / "none")).read()


def test_each_image_gets_the_gpus_it_is_for(places: AmdPlaces) -> None:
    amd = read_amd(places)
    assert amd is not None
    both = replace(amd, gpus=(*HOST.gpus, *amd.gpus))
    chosen = choose_gpus(both.gpus, "", amd=True)
    assert [gpu.uuid for gpu in chosen] == [UUID]
    assert visible_gpus(both, chosen, {}) == (("ROCR_VISIBLE_DEVICES", UUID),)
    given = {"ROCR_VISIBLE_DEVICES": "0", "CUDA_VISIBLE_DEVICES": ""}
    assert visible_gpus(both, chosen, given) == (("ROCR_VISIBLE_DEVICES", "0"),)
    assert assigned_gpus(both, {"ROCR_VISIBLE_DEVICES": ""}, amd=True) is None
    assert choose_gpus(both.gpus, "gfx942", amd=True) == ()
    assert choose_gpus(amd.gpus, "") == ()  # of NVIDIA's it has none
