"""What the doctor says of a machine's GPUs. Pure."""

from __future__ import annotations

from pathlib import Path

from imagefactory.doctor.facts import Diagnosis, Health, MachineFacts
from imagefactory.runners.amd_devices import AmdGpus
from imagefactory.runners.gpu_devices import count_gpus
from imagefactory.verify.suite_report import clean


def judge_gpus(facts: MachineFacts) -> list[Diagnosis]:
    """A line for each maker's GPUs; one where there is none."""
    amd = [_amd(facts.amd)] if facts.amd else []
    return amd if amd and not count_gpus(map(Path, facts.gpu_nodes)) else [*_nvidia(facts), *amd]


def _amd(found: AmdGpus) -> Diagnosis:
    kinds = ", ".join(f"{found.processors.count(one)} x {one}" for one in dict.fromkeys(found.processors))
    driver = f"amdgpu {found.driver}" if found.driver else "the kernel's own amdgpu"
    detail = f"AMD: {kinds}, {driver}"
    if not any(path.endswith("/dri") for path in found.devices):
        return Diagnosis(
            name="GPU",
            state=Health.DENIED,
            detail=f"{detail}; there is no /dev/dri",
            remedy="start this container with --device /dev/dri beside /dev/kfd",
            needed_for="gpu",
        )
    if found.refused:
        return Diagnosis(
            name="GPU",
            state=Health.DENIED,
            detail=f"{detail}; you may not open {', '.join(found.refused)}",
            remedy="add yourself to the groups that own them: usermod -aG render,video $USER",
            needed_for="gpu",
        )
    return Diagnosis(name="GPU", state=Health.OK, detail=detail, needed_for="gpu")


def _nvidia(facts: MachineFacts) -> list[Diagnosis]:
    count = count_gpus(Path(node) for node in facts.gpu_nodes)
    if not count:
        return [
            Diagnosis(
                name="GPU",
                state=Health.WARNING,
                detail="no GPU here: images can be built and smoke-tested, not verified",
                remedy="go where `nvidia-smi` or `rocminfo` lists one: `imagefactory run --nv TARGET -- ...`",
                needed_for="gpu",
            )
        ]
    detail = f"{count} NVIDIA GPU{'s' if count > 1 else ''}, driver {facts.driver or 'of unknown version'}"
    if not any(name.startswith("libcuda.so") for name in facts.driver_libraries):
        return [
            Diagnosis(
                name="GPU",
                state=Health.MISSING,
                detail=f"{detail}; the dynamic linker knows no libcuda.so",
                remedy="install the driver's libraries (Debian: apt-get install libcuda1) and run ldconfig",
                needed_for="gpu",
            )
        ]
    names = {Path(node).name for node in facts.gpu_nodes}
    if not {"nvidiactl", "nvidia-uvm"} <= names:
        return [
            Diagnosis(
                name="GPU",
                state=Health.DENIED,
                detail=f"{detail}; /dev/nvidiactl or /dev/nvidia-uvm is missing",
                remedy="nvidia-modprobe -c 0 -u",
                needed_for="gpu",
            )
        ]
    if facts.lost_gpus:
        return [
            Diagnosis(
                name="GPU",
                state=Health.WARNING,
                detail=f"{detail}; cannot be used: {'; '.join(map(clean, facts.lost_gpus))}",
                remedy="nvidia-smi --gpu-reset -i INDEX, or restart the machine",
                needed_for="gpu",
            )
        ]
    return [Diagnosis(name="GPU", state=Health.OK, detail=detail, needed_for="gpu")]
