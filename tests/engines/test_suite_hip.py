"""T0 on the stand-in for HIP: what is right passes, each lie is seen, with the tables' word for it."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from imagefactory.suite.gpu import table
from tests.made.gpu_suite import Ground, copy_suite, make_expectations

SOURCE = Path(__file__).parents[1] / "services/libhip.c"
LIBRARIES = ("libamdhip64.so.7", "libhiprtc.so.7")
GOOD = make_expectations(
    capability="gfx90a", framework="numpy", packages={"numpy": "2.0.0"}, cuda="rocm7", driver="", predicted={}
)
# What the stand-in is told -> (the check that fails, its word, a part of what it says).
LIES = {
    "processor=": ("driver", "no-gpu", "hipErrorNoDevice (100): no ROCm-capable device"),
    "fail=hipInit:303": ("driver", "load-failed", "HIP error 303"),
    "fail=hipInit:304": ("driver", "infrastructure", "HIP error 304"),
    "processor=gfx1100": ("device", "wrong-gpu", "capability gfx90a was asked for, this is stand-in"),
    "processor=none": ("device", "load-failed", "it tells no processor"),
    "fail=hipMalloc:2": ("vector-add", "infrastructure", "hipMalloc"),
    "fail=hipModuleLoadData:209": ("vector-add", "no-kernel", "hipModuleLoadData"),
    "fail=hiprtcCompileProgram:6": ("vector-add", "load-failed", "its compiler says: error: expected ';'"),
    "fail=hipModuleLaunchKernel:719": ("vector-add", "load-failed", "hipModuleLaunchKernel: HIP error 719"),
    "kernel=never": ("vector-add", "wrong-numbers", "30011 of 30011 elements are wrong"),
    "kernel=wrong": ("vector-add", "wrong-numbers", "1 of 30011 elements are wrong: [15005]"),
    "memory=leak": ("memory-returned", "load-failed", "did not come back"),
    "kernel=always": ("driver-controls", "wrong-numbers", "a kernel that subtracts gave the sum"),
    "source=any": ("driver-controls", "wrong-numbers", "HIP that is none was compiled"),
}


def build(folder: Path, *options: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name in LIBRARIES:
        command = ["gcc", "-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-Werror", f"-Wl,-soname,{name}"]
        subprocess.run([*command, *options, str(SOURCE), "-o", str(folder / name)], check=True)
    return folder


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("hip"))


@pytest.fixture(scope="module")
def suite(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return copy_suite(tmp_path_factory.mktemp("suite"))


def test_everything_passes_on_an_honest_driver(suite: Path, library: Path, tmp_path: Path) -> None:
    ran = Ground(suite=suite, library=library, folder=tmp_path / "run").run(GOOD)
    assert ran.code == 0, ran.errors
    assert {name: ran.rows[name]["state"] for name in table.PARTS["driver"]} == dict.fromkeys(
        table.PARTS["driver"], "passed"
    )
    assert (ran.report["device"], ran.report["cuda"]) == (
        {
            "name": "stand-in of the tests 0",
            "capability": "gfx90a",
            "uuid": "GPU-00000000fafbfc00",
            "memory": 64 << 30,
        },
        "",
    )
    assert ran.rows["driver"]["detail"].startswith("HIP 7.0 starts; libamdhip64 is ")
    assert ran.rows["vector-add"]["detail"] == "30011 sums by HIP that HIPRTC compiled, all exact"


@pytest.mark.parametrize("lie", LIES)
def test_a_lie_is_seen(suite: Path, library: Path, tmp_path: Path, lie: str) -> None:
    check, word, text = LIES[lie]
    ran = Ground(suite=suite, library=library, folder=tmp_path / "run").run(GOOD, lie, part="driver")
    row = ran.rows[check]
    assert (ran.code, row["state"], row["outcome"]) == (1, "failed", word), row
    assert text in row["detail"]


def test_hip_5_tells_the_processor_too(suite: Path, tmp_path: Path) -> None:
    old = build(tmp_path / "old", "-DOLD")
    ran = Ground(suite=suite, library=old, folder=tmp_path / "run").run(GOOD, part="driver")
    assert ran.code == 0, ran.rows


def test_an_image_without_rocm_did_not_load(suite: Path, tmp_path: Path) -> None:
    ran = Ground(suite=suite, library=tmp_path, folder=tmp_path / "run").run(GOOD, part="driver")
    assert ran.states()["driver"] == ("failed", "load-failed")
    assert "the image's ROCm is not there: libamdhip64.so.7" in ran.rows["driver"]["detail"]


def test_of_several_gpus_the_one_asked_for(suite: Path, library: Path, tmp_path: Path) -> None:
    ground = Ground(suite=suite, library=library, folder=tmp_path / "run")
    ran = ground.run(GOOD, "processor=gfx1100,gfx90a", part="driver")
    assert ran.report["facts"]["device"]["uuid"] == "GPU-00000000fafbfc01"
    assert ran.report["facts"]["visible"] == 2
