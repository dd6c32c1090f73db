"""The pip part of a conda environment: solved by uv above packages that conda brings."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from imagefactory.errors import UnsolvableError
from imagefactory.gpu import knowledge
from imagefactory.lock import LockRequest
from imagefactory.lock.conda.locker import conda_distributions, lock_pip, outdated_pip
from imagefactory.model import LockedCondaPackage, LockedWheel, SourceLocation
from imagefactory.progress import QuietProgress
from tests.made.errors import fails
from tests.made.values import make_base, make_conda, make_lock, make_target
from tests.services.package_index import Index, package_index, uv_locker

BASE = make_base(python="3.13")
TARGET = make_target(
    name="lab-2.3-cu121",
    family="lab",
    source="conda",
    framework="pytorch",
    requirements=("pytorch 2.3.*",),
    channels=("https://conda.anaconda.org/conda-forge",),
    virtual=(("__cuda", "12.1"), ("__glibc", "2.28")),
    pip=("tools",),
    where=SourceLocation(file="recipes/lab.yaml", line=7, column=5),
)
REQUEST = LockRequest(target=TARGET, base=BASE)


def package(name: str, version: str, *depends: str) -> LockedCondaPackage:
    return make_conda(f"{name} {version} 0", *depends)


CONDA = (
    package("libcurl", "8.0"),
    package("matplotlib", "3.9.2", "matplotlib-base >=3.9.2,<3.9.3.0a0", "python"),
    package("matplotlib-base", "3.9.2", "python >=3.11,<3.12.0a0"),
    package("numpy", "1.26.4", "libblas", "python_abi 3.11.* *_cp311"),
    package("python", "3.11.9", "libzlib"),
    package("pytorch", "2.3.1", "python >=3.11,<3.12.0a0", "numpy"),
)


def pins(wheels: tuple[LockedWheel, ...]) -> list[str]:
    return [f"{wheel.name}=={wheel.version}" for wheel in wheels]


@pytest.fixture
def index(tmp_path: Path) -> Iterator[Index]:
    with package_index(tmp_path / "index") as index:
        index.add("tools", "1.0", needs=("torch>=2", "numpy<=1.26.4", "Matplotlib>=3", "small"))
        index.add("small", "1.0")
        for version in ("1.26.4", "2.1.0"):  # never taken: conda brings it
            index.add("numpy", version)
        index.add("torch", "2.9.0")
        yield index


def test_every_row_of_the_names_has_a_source() -> None:
    import tomllib

    text = (Path(knowledge.__file__).parent / "conda_pypi.toml").read_text()
    rows = tomllib.loads(text)["name"]
    assert [row["conda"] for row in rows] == sorted({row["conda"] for row in rows})
    for row in rows:
        assert re.match(r"(measured 20\d\d-\d\d|documented): .{20,}", row["source"]), row
        assert all(re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", name) for name in row["pypi"]), row
    assert knowledge.pypi_names()["tensorflow-base"] == ("tensorflow",)


def test_conda_packages_by_their_names_on_pypi() -> None:
    more = (
        package("tzdata", "2024a"),  # time zones, not the Python package
        package("py-opencv", "4.9.0", "python"),
        package("odd", "r1234", "python"),
        package("ruamel.yaml", "0.18_6", "python"),
        package("own", "1.0+cuda", "python"),
    )
    given = conda_distributions((*CONDA, *more))
    assert {name: one.version for name, one in given.items()} == {
        "matplotlib": "3.9.2",
        "numpy": "1.26.4",
        "odd": "0",
        "opencv-python": "4.9.0",
        "opencv-python-headless": "4.9.0",
        "own": "1.0",
        "ruamel-yaml": "0.18.6",
        "torch": "2.3.1",
    }
    assert given["matplotlib"].conda.name == "matplotlib-base"


def test_what_conda_brings_is_not_taken_from_the_index(index: Index, tmp_path: Path) -> None:
    uv = uv_locker(index, tmp_path)
    wheels = lock_pip(REQUEST, CONDA, uv)
    assert pins(wheels) == ["small==1.0", "tools==1.0"]
    assert all(wheel.size > 0 and len(wheel.sha256) == 64 for wheel in wheels)
    named = replace(REQUEST, target=replace(TARGET, pip=("tools", "numpy>=1.20")))
    assert lock_pip(named, CONDA, uv) == wheels
    assert lock_pip(replace(REQUEST, target=replace(TARGET, pip=())), CONDA, uv) == ()


def test_wheels_fit_the_glibc_and_the_python_of_the_environment(index: Index, tmp_path: Path) -> None:
    """Not the base's: its Python is another, and its C library newer than what the target counts on."""
    index.add("small", "2.0", tag="cp313-cp313-manylinux_2_28_x86_64")
    index.add("small", "3.0", tag="cp311-cp311-manylinux_2_34_x86_64")
    index.add("small", "1.5", tag="cp311-cp311-manylinux_2_28_x86_64")
    uv = uv_locker(index, tmp_path)
    wheels = lock_pip(replace(REQUEST, target=replace(TARGET, pip=("small",))), CONDA, uv)
    assert pins(wheels) == ["small==1.5"]
    # uv has no platform for every C library; the next older one serves.
    lock = make_lock(platform="manylinux_2_29_x86_64", wheels=wheels)
    assert list(uv.addresses(lock)) == [wheels[0].filename]


def test_previous_wheels_stay_but_for_those_to_update(index: Index, tmp_path: Path) -> None:
    uv = uv_locker(index, tmp_path)
    lock = make_lock(target=TARGET.name, wheels=lock_pip(REQUEST, CONDA, uv), conda=CONDA)
    index.add("small", "1.1")
    index.add("tools", "1.1", needs=("small",))
    held = replace(REQUEST, previous=lock)
    assert lock_pip(held, CONDA, uv) == lock.wheels
    assert pins(lock_pip(replace(held, update=("small", "numpy")), CONDA, uv)) == ["small==1.1", "tools==1.0"]
    assert pins(lock_pip(replace(held, update_all=True), CONDA, uv)) == ["small==1.1", "tools==1.1"]
    more = replace(TARGET, name="more", on=TARGET.name, pip=("tools", "small>=1", "added"))
    index.add("added", "1.0", needs=("small",))
    above = lock_pip(LockRequest(target=more, base=BASE, under=lock), CONDA, uv)
    assert pins(above) == ["added==1.0", "small==1.0", "tools==1.0"]
    assert set(lock.wheels) < set(above)
    brings = (*CONDA, package("small", "2.0", "python"))
    with fails("parent-package-conflict") as caught:
        lock_pip(LockRequest(target=more, base=BASE, under=lock), brings, uv)
    assert all(value in caught.value.message for value in ("small 1.0", "lab-2.3-cu121", "small 2.0"))
    assert "'small' in `packages` of lab-2.3-cu121" in caught.value.hint


def test_a_pip_requirement_that_contradicts_conda(index: Index, tmp_path: Path) -> None:
    uv = uv_locker(index, tmp_path)
    target = replace(TARGET, pip=("torch>=2.5", "tools"))
    with fails("pip-conda-conflict") as caught:
        lock_pip(replace(REQUEST, target=target), CONDA, uv)
    assert all(
        value in caught.value.message for value in ("lab-2.3-cu121: ", "'torch>=2.5'", "pytorch 2.3.1")
    )
    assert "write 'pytorch >=2.5' in `packages`" in caught.value.hint
    assert "recipes/lab.yaml:7:5" in caught.value.hint
    assert index.requests == []


def test_a_dependency_that_contradicts_conda(index: Index, tmp_path: Path) -> None:
    uv = uv_locker(index, tmp_path)
    index.add("newer", "1.0", needs=("numpy>=2",))
    with pytest.raises(UnsolvableError) as caught:
        lock_pip(replace(REQUEST, target=replace(TARGET, pip=("newer",))), CONDA, uv)
    assert "newer" in caught.value.message
    assert "numpy>=2" in caught.value.message
    assert "conda's numpy 1.26.4" in caught.value.message
    assert "+given" not in caught.value.message + caught.value.hint + caught.value.tree
    assert "'numpy >=2' in `packages`" in caught.value.hint


def test_a_package_that_the_index_does_not_have(index: Index, tmp_path: Path) -> None:
    with pytest.raises(UnsolvableError, match="nothing-such") as caught:
        lock_pip(
            replace(REQUEST, target=replace(TARGET, pip=("nothing-such",))), CONDA, uv_locker(index, tmp_path)
        )
    assert "`pip`" in caught.value.hint


@pytest.mark.parametrize("core_metadata", [False, True], ids=["in-the-wheel", "beside-it"])
def test_extras_of_what_conda_brings(index: Index, tmp_path: Path, core_metadata: bool) -> None:
    """conda knows no extras: what they need comes from PyPI, as the same version there says."""
    index.core_metadata = core_metadata
    index.add(
        "fsspec",
        "2024.2.0",
        needs=("base-need", "http-need>=1,<2; extra == 'http'", "fsspec[http]; extra == 'full'"),
        extras=("http", "full"),
    )
    for name, version in (("http-need", "1.5"), ("http-need", "2.0"), ("base-need", "1.0")):
        index.add(name, version)
    index.add("datasets", "1.0", needs=("fsspec[full]>=2023",))
    conda = (*CONDA, package("fsspec", "2024.2.0", "python >=3.8"))
    request = replace(REQUEST, target=replace(TARGET, pip=("datasets", "numpy[none]")))
    uv = uv_locker(index, tmp_path)
    assert pins(lock_pip(request, conda, uv)) == ["datasets==1.0", "http-need==1.5"]
    with fails("package-extras-unknown") as caught:
        lock_pip(request, (*CONDA, package("fsspec", "2024.3.1", "python >=3.8")), uv)
    assert all(value in caught.value.message for value in ("fsspec[full]", "fsspec 2024.3.1"))
    assert "fsspec in `packages`" in caught.value.hint


def test_an_old_release_in_place_of_one_that_conda_forbids(index: Index, tmp_path: Path) -> None:
    """The newest release needs another numpy than conda brings; what conda brings is not compared."""
    index.add("tools", "2.0", needs=("numpy>=2", "small"))
    uv = uv_locker(index, tmp_path)
    lock = make_lock(target=TARGET.name, conda=CONDA, wheels=lock_pip(REQUEST, CONDA, uv))
    assert pins(lock.wheels) == ["small==1.0", "tools==1.0"]
    (behind,) = outdated_pip(REQUEST, lock, uv, QuietProgress())
    assert (behind.name, behind.newest, behind.accept, behind.named) == ("tools", "2.0", "tools<2.0", True)
    assert behind.reason == "it needs numpy>=2, conda brings numpy 1.26.4"
    accepted = replace(REQUEST, target=replace(TARGET, pip=("tools<2.0",)))
    assert outdated_pip(accepted, lock, uv, QuietProgress()) == ()
