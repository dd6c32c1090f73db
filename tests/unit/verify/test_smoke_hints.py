"""What a failed smoke test says, and what to write so that it passes."""

from __future__ import annotations

from dataclasses import replace

import pytest
from packaging.requirements import Requirement

from imagefactory.model import CheckResult, CheckState
from imagefactory.recipes.values import RULES
from imagefactory.verify.smoke_hints import _table, find_hint
from tests.made.trial import make_definition


def failed(detail: str, state: CheckState = CheckState.FAILED) -> CheckResult:
    return CheckResult(name="import", state=state, detail=detail, seconds=0.0)


@pytest.mark.parametrize(
    ("detail", "hint"),
    [
        ("cv2 of opencv-python: ImportError: libGL.so.1: cannot open shared object file", "system: [libgl1]"),
        ("libX11.so.6 is not found (needed by a.so); libSM.so.6 is not found", "system: [libsm6, libx11-6]"),
        ("clip of clip: ModuleNotFoundError: No module named 'pkg_resources'", "packages: [setuptools<82]"),
        ("No module named 'torchvision'", "packages: [torchvision]"),
        ("No module named 'cv2.data'", "packages: [opencv-python-headless]"),
        ("No module named 'google.protobuf'", "packages: [protobuf]"),
        ("pyarrow was compiled for NumPy 1 and cannot run with NumPy 2.1.0", "constraints: [numpy<2]"),
        ("No module named 'nobody'; No module named 'any'", "the packages that have the modules any, nobody"),
        ("sounddevice of sounddevice: OSError: PortAudio library not found", "system: [libportaudio2]"),
    ],
)
def test_what_is_missing_is_named_by_what_brings_it(detail: str, hint: str) -> None:
    assert f"add {hint} to the recipe" in find_hint(make_definition(), [failed(detail)])


def test_all_of_it_is_one_hint() -> None:
    checks = [failed("libGL.so.1: cannot open"), failed("No module named 'setuptools'")]
    assert "add system: [libgl1] and packages: [setuptools<82] to" in find_hint(make_definition(), checks)


@pytest.mark.parametrize(
    "detail", ["libnobody.so.7 is not found", "No module named 'nobody.part'", "libcuda.so.1", ""]
)
def test_what_no_table_knows_gets_no_hint(detail: str) -> None:
    assert find_hint(make_definition(), [failed(detail)]) == ""


@pytest.mark.parametrize(
    ("requirements", "given"),
    [(("numpy",), True), (("numpy>=1.20",), True), (("numpy==2.1.*",), False), (("torch>=2",), True)],
)
def test_what_the_recipe_forbids_is_not_advised(requirements: tuple[str, ...], *, given: bool) -> None:
    definition = make_definition(requirements=requirements)
    told = [failed("pyarrow was compiled for NumPy 1 and cannot run with NumPy 2.1.0")]
    assert bool(find_hint(definition, told)) is given
    numpy = replace(definition.lock.wheels[0], name="numpy")
    below = replace(definition, under=(replace(definition.lock, wheels=(numpy,)),))
    assert find_hint(below, told) == ""


def test_what_is_locked_or_excluded_is_not_added() -> None:
    told = [failed("No module named 'cv2.data'")]
    definition = make_definition()
    excluded = replace(definition, target=replace(definition.target, exclude=("opencv-python-headless",)))
    assert find_hint(excluded, told) == ""
    assert find_hint(definition, [failed("No module named 'torch._C'")]) == ""
    numpy = replace(definition.lock.wheels[0], name="numpy")
    locked = replace(definition, lock=replace(definition.lock, wheels=(numpy,)))
    assert find_hint(locked, [failed("No module named 'numpy.core._x'")]) == ""


def test_what_passed_is_no_fault() -> None:
    assert find_hint(make_definition(), [failed("libGL.so.1", CheckState.PASSED)]) == ""


def test_on_a_registrys_image_no_package_of_debian_can_be_added() -> None:
    definition = make_definition()
    image = replace(definition, base=replace(definition.base, image="docker.io/x/y@sha256:" + "0" * 64))
    assert "system:" not in find_hint(image, [failed("libGL.so.1: cannot open")])
    assert "libgl1" in find_hint(image, [failed("libGL.so.1: cannot open")])


def test_each_row_of_the_tables_can_be_written_in_a_recipe() -> None:
    for row in _table()["message"]:
        assert RULES["debian package"].allows(row["system"])
        assert row["source"]
    assert all(Requirement(text).specifier.contains(version) for text, version in _table()["fits"].items())
    for row in _table()["module"]:
        assert RULES["package"].allows(row["package"])
        assert row["package"] in _table()["fits"]
        assert row["source"]
    assert all(map(RULES["package"].allows, _table()["distribution"].values()))
