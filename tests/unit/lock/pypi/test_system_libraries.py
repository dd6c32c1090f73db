"""Libraries of the system that wheels ask for: read from the wheel, or from the table, and told."""

from __future__ import annotations

import subprocess
import tomllib
from pathlib import Path

from imagefactory.lock.pypi import system_libraries
from imagefactory.lock.pypi.system_libraries import find_lacking, read_needed
from imagefactory.model import LockedWheel
from tests.made.wheels import locked, make_wheel

OPENCV = LockedWheel(name="opencv-python", version="4.10.0.84", filename="a.whl", sha256="0" * 64, size=1)
BASE = ("libc6", "libglib2.0-0t64", "libx11-6")


def library(folder: Path, name: str, *needs: str) -> bytes:
    """A shared library that asks for others, made by gcc."""
    for need in needs:
        subprocess.run(
            ["gcc", "-shared", "-fPIC", "-x", "c", "/dev/null", f"-Wl,-soname,{need}", "-o", folder / need],
            check=True,
        )
    others = [str(folder / need) for need in needs]
    made = folder / name
    options = ["-Wl,--no-as-needed", *others, "-o", made]
    subprocess.run(["gcc", "-shared", "-fPIC", "-x", "c", "/dev/null", "-x", "none", *options], check=True)
    return made.read_bytes()


def test_a_wheel_that_is_not_here_is_known_by_the_table() -> None:
    (one,) = find_lacking((OPENCV, locked_as("numpy")), BASE, lambda _: None)
    assert one.instead == "opencv-python-headless"
    assert "libGL.so.1" in one.libraries
    assert "libglib-2.0.so.0" not in one.libraries  # the base has it, by the name of Debian 13
    assert "libX11.so.6" not in one.libraries
    told = one.message("debian-13")
    assert told.startswith("opencv-python 4.10.0.84 asks for libGL.so.1, ")
    assert "opencv-python-headless does without them; or write system: [libgl1, " in told


def locked_as(name: str) -> LockedWheel:
    return LockedWheel(name=name, version="1", filename=f"{name}.whl", sha256="1" * 64, size=1)


def test_what_debian_does_not_have_wants_another_base() -> None:
    (one,) = find_lacking((locked_as("jax-rocm7-pjrt"),), BASE, lambda _: None)
    assert one.message("debian-12") == (
        "jax-rocm7-pjrt 1 asks for libMIOpen.so.1, libamdhip64.so.7, librocblas.so.5, which base debian-12 "
        "does not have, nor has Debian: name an image with ROCm at base in the recipe"
    )


def test_a_wheel_that_is_here_is_read(tmp_path: Path) -> None:
    data = library(tmp_path, "demo.so", "libGL.so.1", "libown-1.so.2", "libX11.so.6", "libodd.so.1")
    own = library(tmp_path, "libown-1.so.2")
    path = make_wheel(tmp_path, "demo", {"demo/demo.so": data, "demo.libs/libown-1.so.2": own})
    assert (read_needed(path) or set()) - {"libc.so.6"} == {"libGL.so.1", "libX11.so.6", "libodd.so.1"}
    (one,) = find_lacking((locked(path),), BASE, lambda _: path)
    assert (one.libraries, one.packages, one.instead) == (("libGL.so.1",), ("libgl1",), "")
    assert one.message("debian-12").endswith("write system: [libgl1] in the recipe")


def test_what_is_read_outweighs_the_table(tmp_path: Path) -> None:
    path = make_wheel(tmp_path, "opencv_python", {"cv2/cv2.so": library(tmp_path, "cv2.so")})
    assert find_lacking((locked(path),), BASE, lambda _: path) == ()


def test_what_cannot_be_read_is_taken_from_the_table(tmp_path: Path) -> None:
    broken = tmp_path / "a.whl"
    broken.write_bytes(b"no zip")
    assert read_needed(broken) is None
    assert len(find_lacking((OPENCV,), BASE, lambda _: broken)) == 1
    damaged = make_wheel(tmp_path, "demo", {"demo/demo.so": b"\x7fELF\x02\x01" + bytes(100)})
    assert read_needed(damaged) == frozenset()


def test_the_table_has_sources_and_known_libraries() -> None:
    table = tomllib.loads(Path(system_libraries.__file__).with_suffix(".toml").read_text())
    for row in table["wheel"]:
        assert row["source"]
        assert set(row["needs"]) <= {*table["library"], *table["elsewhere"]}, row["name"]
