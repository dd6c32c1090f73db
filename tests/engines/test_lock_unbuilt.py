"""Packages without a wheel, as uv sees them: all of them are listed, from an index of our own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from imagefactory.access import Access
from imagefactory.actions import lock as stages_lock
from imagefactory.actions.lock import solve_request
from imagefactory.errors import LockError, UnbuiltError
from imagefactory.lock import LockRequest
from imagefactory.lock.conda.locker import lock_pip
from imagefactory.progress import QuietProgress
from tests.made.values import make_base, make_conda, make_target
from tests.services.package_index import Index, package_index, uv_locker

BASE = make_base()
TARGET = make_target(requirements=("torch==2.3.1", "numpy"), constraints=())


@pytest.fixture
def index(tmp_path: Path) -> Iterator[Index]:
    with package_index(tmp_path / "index") as index:
        index.json = True
        index.add("torch", "2.3.1", needs=("numpy", "nvidia-cuda-runtime-cu12==12.1.105"))
        index.add("nvidia-cuda-runtime-cu12", "12.1.105", tag="py3-none-manylinux1_x86_64")
        for version in ("1.26.4", "2.0.0"):
            index.add("numpy", version)
        yield index


def unbuilt(index: Index, tmp_path: Path, *more: str, **fields: Any) -> UnbuiltError:
    target = replace(TARGET, requirements=(*TARGET.requirements, *more), **fields)
    with pytest.raises(UnbuiltError) as caught:
        uv_locker(index, tmp_path).lock(LockRequest(target=target, base=BASE), QuietProgress())
    return caught.value


def names(error: UnbuiltError) -> list[str]:
    return [f"{row['name']} {row['version']}" for row in error.packages]


def test_all_are_listed_at_once_and_none_is_run(index: Index, tmp_path: Path) -> None:
    """Named and required ones, and one that only the newest release of another requires."""
    index.add_sdist("filterpy", "1.4.5", needs=("deep>=1,<2", "numpy<2"))
    for version in ("0.9", "1.2", "2.0"):
        index.add_sdist("deep", version)
    index.add("wrapper", "1.0", needs=("deep==1.*",))
    index.add_sdist("acvl-utils", "0.2", ops__cpp="")
    error = unbuilt(index, tmp_path, "filterpy==1.4.5", "acvl-utils", "wrapper")
    assert names(error) == ["acvl-utils 0.2", "deep 1.2", "filterpy 1.4.5"]
    assert [row["named"] for row in error.packages] == [True, False, True]
    assert set(error.pins) >= {"numpy==1.26.4", "wrapper==1.0", "torch==2.3.1"}


def test_an_older_release_is_taken_where_the_newest_contradicts_the_recipe(
    index: Index, tmp_path: Path
) -> None:
    index.add_sdist("ops", "2.0", needs=("numpy>=2",))
    index.add_sdist("ops", "1.0", needs=("numpy<2",))
    assert names(unbuilt(index, tmp_path, "ops", constraints=("numpy<2",))) == ["ops 1.0"]


def test_what_no_source_solves_is_unsolvable_or_the_solvers_own_error(index: Index, tmp_path: Path) -> None:
    index.add_sdist("ops", "1.0", needs=("numpy>=3",))
    target = replace(TARGET, requirements=(*TARGET.requirements, "ops"))
    with pytest.raises(LockError) as caught:
        uv_locker(index, tmp_path).lock(LockRequest(target=target, base=BASE), QuietProgress())
    assert not isinstance(caught.value, UnbuiltError)


def test_the_rest_locks_without_them(index: Index, tmp_path: Path) -> None:
    index.add_sdist("deep", "1.2")
    index.add("wrapper", "1.0", needs=("deep==1.*",))
    error = unbuilt(index, tmp_path, "wrapper")
    rest = replace(TARGET, requirements=(*TARGET.requirements, *error.pins))
    lock = uv_locker(index, tmp_path).lock(
        LockRequest(target=rest, base=BASE, absent=("deep==1.2",)), QuietProgress()
    )
    assert [f"{wheel.name}=={wheel.version}" for wheel in lock.wheels] == sorted(error.pins)


def test_a_release_that_is_held_back_by_a_package_without_a_wheel_lists_it(
    index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """hydra-core 1.3 requires antlr4 4.9, which has no wheel: uv goes back to 0.11."""
    index.add_sdist("antlr4", "4.9.3")
    index.add("hydra-core", "0.11")
    index.add("hydra-core", "1.3", needs=("antlr4==4.9.*",))
    target = replace(TARGET, requirements=(*TARGET.requirements, "hydra-core"))
    uv = uv_locker(index, tmp_path)
    monkeypatch.setattr(stages_lock, "target_locker", lambda *_: uv)
    access: Access = None  # type: ignore[assignment]
    with pytest.raises(UnbuiltError) as caught:
        solve_request(access, LockRequest(target=target, base=BASE), QuietProgress(), build=True)
    assert names(caught.value) == ["antlr4 4.9.3"]
    assert "hydra-core==1.3" in caught.value.pins


def test_the_pip_part_of_a_conda_target_lists_them_too(index: Index, tmp_path: Path) -> None:
    conda = (make_conda("numpy 1.26.4 0", "python"), make_conda("python 3.11.9 0"))
    index.add_sdist("ops", "1.0", needs=("numpy<2", "small"))
    index.add("small", "1.0")
    target = make_target(
        source="conda",
        requirements=("pytorch 2.3.*",),
        channels=("https://conda.example.org/conda-forge",),
        virtual=(("__glibc", "2.28"),),
        pip=("ops",),
    )
    with pytest.raises(UnbuiltError) as caught:
        lock_pip(LockRequest(target=target, base=BASE), conda, uv_locker(index, tmp_path))
    assert (names(caught.value), caught.value.pins) == (["ops 1.0"], ("small==1.0",))
    rest = LockRequest(target=replace(target, pip=("small==1.0",)), base=BASE, absent=("ops==1.0",))
    wheels = lock_pip(rest, conda, uv_locker(index, tmp_path))
    assert [wheel.name for wheel in wheels] == ["small"]
