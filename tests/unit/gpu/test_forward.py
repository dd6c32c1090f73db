"""Which libcuda answers: notes and decisions as in the tests of NVIDIA's container toolkit."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from imagefactory.gpu import forward
from tests.made.gpu_code import forward_libcuda, forward_note

BRANCHES = (535, 550, 560, 565, 570, 575)
NOTE = forward.ForwardNote("12.9", BRANCHES)


@pytest.mark.parametrize(
    ("data", "note"),
    [
        (forward_note("12.9", BRANCHES), NOTE),
        (forward_libcuda("13.1", (535, 590)), forward.ForwardNote("13.1", (535, 590))),
        (
            b'NVIDIA Corporation\0\0{"Format":1,"CUDA Version":"13.2"}',
            forward.ForwardNote("13.2", ()),
        ),  # Jetson
        (b'NVIDIA Corporation\0\0{"format":1,"CUDA version":"13.2",}', None),
        (b'NVIDIA Corporation\0\0{"CUDA version":"13.2","driver":[true]}', None),
        (b'NVIDIA Corporation\0\0{"CUDA version":"13.2","driver":' + b"[" * 1500 + b"}", None),
        (b'NVIDIA Corporation\0\0{"CUDA version":"\x1b[2J","driver":[535]}', None),
        (b'{"format":1,"CUDA version":"13.1","driver":[535]}', None),  # of another maker
        (b"", None),
    ],
)
def test_the_note_of_forward_compatibility(data: bytes, note: forward.ForwardNote | None) -> None:
    assert forward.parse_forward_note(data) == note


@pytest.mark.parametrize(
    ("note", "driver", "chosen"),
    [
        (NOTE, "570.211.01", True),
        (NOTE, "575.10.10", True),
        (NOTE, "575.57.08", False),
        (NOTE, "575.99.99", False),
        (NOTE, "590.44.01", False),
        (NOTE, "545.23.06", False),  # of a branch that it does not serve
        (NOTE, "535", True),
        (NOTE, "", False),
        (None, "570.211.01", True),
        (None, "575.10.10", False),
        (None, "99.55.66", True),
        (forward.ForwardNote("13.2", ()), "540.4.0", False),
    ],
)
def test_the_images_libcuda_is_for_older_drivers_of_its_list(
    note: forward.ForwardNote | None, driver: str, chosen: bool
) -> None:
    assert forward.chooses_forward("575.57.08", note, driver, ["NVIDIA A100-SXM4-80GB"]) is chosen
    assert forward.chooses_forward("575.57.08", note, driver, []) is chosen
    assert not forward.chooses_forward("575.57.08", note, driver, ["Tesla T4", "NVIDIA GeForce RTX 3090"])


NAME = "libcuda.so.575.57.08"


@pytest.mark.parametrize(
    ("names", "chosen"),
    [
        ((NAME, "libcuda.so", "libcuda.so.1", "libnvidia-nvvm.so.575.57.08"), True),
        ((NAME, "libcuda.so.570.86.10"), False),  # as NVIDIA's hook: nobody knows which
        (("libcuda.so.1",), False),
        ((), False),
    ],
)
def test_a_directory_must_have_one_library(names: tuple[str, ...], chosen: bool) -> None:
    directory = forward.forward_directory(names, forward_libcuda("12.9", (535, 575)), "535.54.03", ())
    assert directory == (forward.FORWARD_DIRECTORY if chosen else "")


def test_a_container_without_a_hook_is_looked_at_by_its_shell(tmp_path: Path) -> None:
    place = tmp_path / "compat"
    script = forward.LOOK.replace(forward.FORWARD_DIRECTORY, str(place))

    def look(driver: str) -> str:
        output = subprocess.run(["/bin/sh", "-c", script], capture_output=True, check=True).stdout
        return forward.read_look(output, driver, ["NVIDIA A100-PCIE-40GB"])

    assert look("535.54.03") == ""
    place.mkdir()
    (place / NAME).write_bytes(forward_libcuda("12.9", (535, 575)))
    (place / "libcuda.so.1").symlink_to(NAME)
    (place / "libcuda.so.575.1").symlink_to(NAME)
    assert look("535.54.03") == forward.FORWARD_DIRECTORY
    assert look("580.65.06") == ""
    (place / "libcuda.so.575.2").write_bytes(b"")
    assert look("535.54.03") == ""


@pytest.mark.parametrize(
    ("before", "after"), [("/image/lib:/driver", "/first:/image/lib:/driver"), ("", "/first")]
)
def test_the_directory_comes_first(before: str, after: str) -> None:
    argv = ["/bin/sh", "-c", forward.FIRST, "/first", "/bin/sh", "-c", 'echo "$LD_LIBRARY_PATH"; exit 7']
    done = subprocess.run(argv, env={"LD_LIBRARY_PATH": before}, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (7, f"{after}\n")
