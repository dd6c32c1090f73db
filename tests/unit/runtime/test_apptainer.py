"""The command line that starts apptainer."""

from __future__ import annotations

from dataclasses import replace

import pytest

from imagefactory.errors import UsageError
from imagefactory.gpu.forward import FIRST
from imagefactory.model import RunSpec
from imagefactory.runtime.apptainer import CallerIdentity, gpu_options, plan
from imagefactory.runtime.devices import GpuDevices

CALLER = CallerIdentity(uid=0, gid=0, unshare="")


def test_limits_that_are_asked_for_are_apptainers_own() -> None:
    spec = RunSpec(argv=("true",), limits=(("processes", 50), ("memory", 1 << 30), ("files", None)))
    argv = plan("apptainer", "a.sif", spec, CALLER, started=3).argv
    assert argv[argv.index("--pids-limit") + 1] == "50"
    assert argv[argv.index("--memory") + 1] == str(1 << 30)
    plain = plan("apptainer", "a.sif", RunSpec(argv=("true",)), CALLER, started=3).argv
    assert not {"--pids-limit", "--memory"} & set(plain)


def test_gpus_are_asked_for_by_their_makers_options() -> None:
    nvidia = GpuDevices(
        devices=("/dev/nvidia0",), libraries=("/lib/libcuda.so.1",), links=(), programs=(), driver=""
    )
    amd = replace(nvidia, devices=("/dev/kfd", "/dev/dri"), libraries=())
    both = replace(nvidia, devices=(*nvidia.devices, *amd.devices))
    assert [gpu_options(one) for one in (nvidia, amd, both)] == [("--nv",), ("--rocm",), ("--nv", "--rocm")]
    caller = replace(CALLER, gpus=("--rocm",))
    asked = plan("apptainer", "a.sif", RunSpec(argv=("true",), gpus=True), caller, started=3).argv
    assert ("--rocm" in asked, "--nv" in asked) == (True, False)
    assert "--rocm" not in plan("apptainer", "a.sif", RunSpec(argv=("true",)), caller, started=3).argv


def test_the_images_libcuda_comes_first_after_the_image_has_set_its_variables() -> None:
    caller = replace(CALLER, forward="/usr/local/cuda/compat")
    words = plan("apptainer", "a.sif", RunSpec(argv=("true", "a b"), gpus=True), caller, started=3)
    *_, script, name, first, second = words.argv
    assert (name, first, second) == ("/usr/local/cuda/compat", "true", "a b")
    assert script == f"echo >/dev/fd/3; {FIRST}"
    assert not any("LD_LIBRARY_PATH" in variable for variable, _ in words.environment)


def test_nvidia_container_cli_gets_the_selected_gpus() -> None:
    def variables(**fields: object) -> dict[str, str]:
        spec = RunSpec(argv=("true",), **fields)  # type: ignore[arg-type]
        return dict(plan("apptainer", "a.sif", spec, CALLER, started=3).environment)

    two = ((1, "GPU-b", "/dev/nvidia1"), (0, "GPU-a", "/dev/nvidia0"))
    assert variables(gpus=True, selected_gpus=two) == {"NVIDIA_VISIBLE_DEVICES": "GPU-b,GPU-a"}
    assert variables(gpus=True) == {"NVIDIA_VISIBLE_DEVICES": "all"}
    assert variables() == {}


@pytest.mark.parametrize("name", ["files", "scratch"])
def test_a_limit_that_it_does_not_hold_is_refused(name: str) -> None:
    spec = RunSpec(argv=("true",), limits=((name, 1),))
    with pytest.raises(UsageError, match=f"apptainer .*{name}") as caught:
        plan("apptainer", "a.sif", spec, CALLER, started=3)
    assert caught.value.code == "option-conflict"
