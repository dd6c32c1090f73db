"""What the doctor says of a machine's GPUs. Pure."""

from __future__ import annotations

from pathlib import Path

from imagefactory.doctor.facts import Diagnosis, Health, MachineFacts
from imagefactory.runners.gpu_devices import count_gpus


def judge_gpus(facts: MachineFacts) -> list[Diagnosis]:
    count = count_gpus(Path(node) for node in facts.gpu_nodes)
    if not count:
        return [
            Diagnosis(
                name="GPU",
                state=Health.WARNING,
                detail="no NVIDIA GPU here: images can be built and smoke-tested, not verified",
                remedy="run it where `nvidia-smi` lists a GPU: `imagefactory run --nv TARGET -- ...`",
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
    return [Diagnosis(name="GPU", state=Health.OK, detail=detail, needed_for="gpu")]
