"""`module`: which programs an image's layers hold, and that a folder is written whole and anew."""

from __future__ import annotations

from pathlib import Path

from imagefactory.access import Access
from imagefactory.actions.images import stored_image
from imagefactory.extras.modules.action import EnvironmentModule, _write_wrappers, programs_of
from imagefactory.oci.layout import Layout
from imagefactory.progress import QuietProgress
from imagefactory.settings.load import load_settings
from tests.made.command import Call
from tests.made.layout import add_image
from tests.made.scanned import tar
from tests.made.values import make_target

TARGET = make_target()
BIN = "opt/env/bin"
ELF, PYTHON = b"\x7fELF" + b"x" * 5000, b"#!/opt/env/bin/python3.11\nimport torch\n"
LAYERS = [
    tar((f"{BIN}/python", b"->/usr/bin/python3.11"), (f"{BIN}/old", PYTHON), ("usr/bin/ls", ELF)),
    tar(
        (f"{BIN}/torchrun", PYTHON),
        (f"{BIN}/ninja", ELF),
        (f"{BIN}/activate", b"# source me"),
        (f"{BIN}/x", b""),
    ),
    tar((f"{BIN}/.wh.old", b""), (f"{BIN}/deep", None), (f"{BIN}/deep/tool", PYTHON)),
]


def test_the_programs_of_an_image_are_those_of_all_its_layers(tmp_path: Path) -> None:
    access = Access(
        settings=load_settings(
            directory=None, start=tmp_path, environ={"IMAGEFACTORY_STORE": str(tmp_path / "store")}
        ),
        environ={},
    )
    layout = Layout(access.settings.store_path)
    with layout.in_use(QuietProgress()):
        add_image(layout, "pytorch:2.3-cu121", LAYERS)
        image = stored_image(access, TARGET)
        assert image
        assert programs_of(access, image, scripts=False, progress=QuietProgress()) == (
            "ninja",
            "python",
            "torchrun",
        )
        assert programs_of(access, image, scripts=True, progress=QuietProgress()) == ("python", "torchrun")


def test_wrappers_take_the_place_of_earlier_ones_whole(tmp_path: Path) -> None:
    module = EnvironmentModule(target=TARGET, folder=tmp_path, image="a-1.sif", programs=("python", "old"))
    _write_wrappers(module)
    (tmp_path / "wrappers/.a-1.new/bin").mkdir(parents=True)  # what a kill left
    _write_wrappers(EnvironmentModule(target=TARGET, folder=tmp_path, image="a-1.sif", programs=("python",)))
    assert {path.name for path in (tmp_path / "wrappers").iterdir()} == {"a-1"}
    assert [path.name for path in (tmp_path / "wrappers/a-1/bin").iterdir()] == ["python"]
    assert (tmp_path / "wrappers/a-1/bin/python").resolve() == tmp_path / "wrappers/a-1/run"


def test_an_image_that_is_not_built_is_said(call: Call, tmp_path: Path) -> None:
    said = call("image", "export", "pytorch-2.3-cu121", "-o", str(tmp_path / "modules"), "--format", "module")
    assert (said.code, said.error_codes) == (7, ("image-not-built",))
    assert "imagefactory build pytorch-2.3-cu121" in said.err
