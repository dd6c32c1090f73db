"""What the doctor says of a machine's GPUs. Pure."""

from __future__ import annotations

from pathlib import Path

from imagefactory.doctor.facts import Diagnosis, Health, MachineFacts
from imagefactory.runners.amd_devices import AmdGpus
from imagefactory.runtime.devices import count_gpus
from imagefactory.verify.suite_report import clean


def judge_gpus(facts: MachineFacts) -> list[Diagnosis]:
    """A line for each maker's GPUs; one where there is none."""
    amd = [_amd(facts.amd)] if facts.amd else []
    return amd if amd and not count_gpus(map(Path, facts.gpu_nodes)) else [_nvidia(facts), *amd]


def _amd(found: AmdGpus) -> Diagnosis:
    kinds = ", ".join(f"{found.processors.count(one)} x {one}" for one in dict.fromkeys(found.processors))
    driver = f"amdgpu {found.driver}" if found.driver else "the kernel's own amdgpu"
    detail = f"AMD: {kinds}, {driver}"
    if not any(path.endswith("/dri") for path in found.devices):
        remedy = "start this container with --device /dev/dri beside /dev/kfd"
        return _line(Health.DENIED, f"{detail}; there is no /dev/dri", remedy)
    if found.refused:
        remedy = "add yourself to the groups that own them: usermod -aG render,video $USER"
        return _line(Health.DENIED, f"{detail}; you may not open {', '.join(found.refused)}", remedy)
    return _line(Health.OK, detail)


def _nvidia(facts: MachineFacts) -> Diagnosis:
    count = count_gpus(Path(node) for node in facts.gpu_nodes)
    if not count:
        detail = "no GPU here: images can be built and smoke-tested, not verified"
        remedy = "go where `nvidia-smi` or `rocminfo` lists one: `imagefactory run --nv TARGET -- ...`"
        return _line(Health.WARNING, detail, remedy)
    detail = f"{count} NVIDIA GPU{'s' if count > 1 else ''}, driver {facts.driver or 'of unknown version'}"
    if not any(name.startswith("libcuda.so") for name in facts.driver_libraries):
        remedy = "install the driver's libraries (Debian: apt-get install libcuda1) and run ldconfig"
        return _line(Health.MISSING, f"{detail}; the dynamic linker knows no libcuda.so", remedy)
    if not {"nvidiactl", "nvidia-uvm"} <= {Path(node).name for node in facts.gpu_nodes}:
        detail += "; /dev/nvidiactl or /dev/nvidia-uvm is missing"
        return _line(Health.DENIED, detail, "nvidia-modprobe -c 0 -u")
    if facts.lost_gpus:
        remedy = "nvidia-smi --gpu-reset -i INDEX, or restart the machine"
        detail += f"; cannot be used: {'; '.join(map(clean, facts.lost_gpus))}"
        return _line(Health.WARNING, detail, remedy)
    return _line(Health.OK, detail)


def _line(state: Health, detail: str, remedy: str = "") -> Diagnosis:
    return Diagnosis("GPU", state, detail, remedy, "gpu")
