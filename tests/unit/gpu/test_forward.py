"""Which libcuda answers: notes and decisions as in the tests of NVIDIA's container toolkit."""

from __future__ import annotations

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
