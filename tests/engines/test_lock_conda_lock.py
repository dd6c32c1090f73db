"""The user's own conda or micromamba as solver, by conda-lock itself; a double over py-rattler stands in."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
from conda_lock.conda_lock import render_lockfile_for_platform  # type: ignore[import-untyped]
from conda_lock.lockfile import parse_conda_lock_file, write_conda_lock_file  # type: ignore[import-untyped]

from imagefactory.errors import UnsolvableError
from imagefactory.lock import LockRequest
from imagefactory.lock.conda.channels import find_channels
from imagefactory.lock.conda.locker import CondaLocker
from imagefactory.lock.conda.own_tool import CondaLockLocker, find_tool
from imagefactory.lock.files import explicit, read_lock, write_lock
from imagefactory.lock.pypi.uv import UvLocker
from imagefactory.model import Lock, LockedCondaPackage
from imagefactory.progress import QuietProgress
from imagefactory.recipes.values import CHANNEL_ROOT
from tests.made.conda_lock import BASE, TARGET
from tests.made.errors import fails
from tests.made.lock_checker import check_lock, moved, read_records
from tests.made.place import Place, make_place
from tests.services.channels import ChannelServer
from tests.services.conda_double import VERSION, write_double

NEWER = (
    ("numpy 1.27.0 py311h0_0", ("python >=3.11,<3.12.0a0",)),
    ("pytorch 2.3.1 cuda121_py311_1", ("python >=3.11,<3.12.0a0", "numpy", "cuda-version 12.1.*", "__cuda")),
)


@pytest.fixture
def place(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    return make_place(capsys, tmp_path, monkeypatch)


@pytest.fixture
def solver(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The setting `solver` leads to a double under this name."""
    (tmp_path / "bin").mkdir()
    path = write_double(tmp_path / "bin", getattr(request, "param", "micromamba"))
    monkeypatch.setenv("IMAGEFACTORY_SOLVER", str(path))
    return path


def lock_of(place: Place) -> Lock:
    lock = read_lock(place.root / "lockfiles", place.factory.targets[0])
    assert lock is not None
    return lock


@pytest.mark.parametrize("solver", ["micromamba", "conda"], indirect=True)
def test_it_locks_what_rattler_locks(place: Place, solver: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code, out, err = place.call("lock", "tiny-*")
    assert (code, out) == (0, "tiny-2.3-cu121: locked 4 packages, 4.0 kB\n"), err
    lock = lock_of(place)
    assert lock.solver == f"{solver.name} {VERSION} by conda-lock 4.0.3"
    assert "--dry-run" in Path(f"{solver}.calls").read_text()
    monkeypatch.delenv("IMAGEFACTORY_SOLVER")
    (place.root / "lockfiles" / "tiny-2.3-cu121.conda-lock.yml").unlink()
    place.call("lock", "tiny-*")
    assert lock_of(place) == replace(lock, solver=lock_of(place).solver)
    assert lock_of(place).solver.startswith("py-rattler")


def test_what_is_locked_stays_and_what_is_named_moves(place: Place, solver: Path) -> None:
    place.call("lock", "tiny-*")
    place.offer(*NEWER)
    place.ask('"extra"')
    code, out, _ = place.call("lock", "tiny-*")
    assert (code, out.splitlines()[1:]) == (0, ["  + extra 1.0 (h0_0)"])
    code, out, _ = place.call("lock", "tiny-*", "--upgrade-package", "numpy")
    assert (code, out.splitlines()[1:]) == (0, ["  ~ numpy 1.26.4 -> 1.27.0"])
    code, out, _ = place.call("lock", "tiny-*", "--upgrade")
    assert (code, out.splitlines()[1:]) == (0, ["  ~ pytorch 2.3.1, cuda121_py311_0 -> cuda121_py311_1"])


def test_what_has_no_solution_is_told_as_by_rattler(place: Place, solver: Path) -> None:
    place.ask('"numpy >=2"')
    said = place.call("lock", "tiny-*")
    code, _, err = said
    assert (code, said.error_codes) == (5, ("no-solution",))
    assert f"tiny-2.3-cu121: {solver.name} " in err
    assert "numpy >=2" in err
    assert "Traceback" not in err
    assert place.states() == {"tiny-2.3-cu121": "unsolvable"}


def test_what_is_kept_of_a_failure_names_no_places_of_this_machine(tmp_path: Path) -> None:
    """Of two mirrors whose addresses begin alike each is known by its own."""
    setting = "conda-forge=http://mirror.site/ab,pytorch=http://mirror.site/abc"
    tool = find_tool(str(write_double(tmp_path, "micromamba")), os.environ)
    locker = CondaLockLocker(tool, find_channels(setting, {}, ""), tmp_path, no_wheels)
    said = (
        "Could not solve: http://mirror.site/abc/linux-64 and http://mirror.site/ab, http://mirror.site/abd"
    )
    error = locker._explain(TARGET, said)
    assert isinstance(error, UnsolvableError)
    assert error.code == "no-solution"
    told = f"{CHANNEL_ROOT}/pytorch/linux-64 and {CHANNEL_ROOT}/conda-forge, http://mirror.site/abd"
    assert error.tree == f"Could not solve: {told}"


def test_a_channel_that_is_gone_is_no_unsolvable_target(place: Place, solver: Path) -> None:
    (place.root / "channel" / "linux-64" / "repodata.json").write_text("{")
    said = place.call("lock", "tiny-*")
    assert (said.code, said.error_codes) == (5, ("solver-failed",))
    assert place.states() == {"tiny-2.3-cu121": "none"}


def test_a_solver_that_is_not_here_is_never_fetched(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    with fails("tool-missing", message="'mamba'"):
        find_tool("mamba", {"PATH": "/nonexistent"})
    monkeypatch.setenv("IMAGEFACTORY_SOLVER", "micromamba")
    monkeypatch.setenv("PATH", "/nonexistent")
    said = place.call("lock", "tiny-*")
    assert (said.code, said.error_codes) == (6, ("tool-missing",))


# --- real records ----------------------------------------------------------------------------------

# In the order of the alphabet, as conda-lock asks: which package is asked first can change what is picked.
REAL = {
    "pytorch": replace(
        TARGET,
        requirements=("python 3.11.*", *TARGET.requirements, "torchvision"),
        constraints=(),
        channels=tuple(f"{CHANNEL_ROOT}/{name}" for name in ("pytorch", "nvidia", "conda-forge")),
    ),
    "conda-forge": replace(
        TARGET,
        name="jax-conda-0.5-cu126",
        framework="jaxlib",
        version="0.5",
        cuda="12.6",
        requirements=("cuda-version 12.6.*", "jax", "jaxlib 0.5.*"),
        constraints=("jaxlib * *cuda*",),
        channels=(f"{CHANNEL_ROOT}/conda-forge",),
        virtual=(("__archspec", "x86_64"), ("__cuda", "12.6"), ("__glibc", "2.36")),
        python="3.12",
    ),
}


def no_wheels() -> UvLocker:
    raise AssertionError("nothing comes from PyPI here")


@pytest.mark.parametrize("name", REAL)
def test_real_records(name: str, real_channels: ChannelServer, tmp_path: Path) -> None:
    """conda-lock with another program gives the same packages, and reads what is written of them."""
    target, tool = REAL[name], find_tool(str(write_double(tmp_path, "micromamba")), os.environ)
    channels = find_channels(f"{CHANNEL_ROOT}={real_channels.url}", {}, "")
    request = LockRequest(target=target, base=BASE)
    ours = CondaLocker(channels, tmp_path / "cache", no_wheels).lock(request, QuietProgress())
    theirs = CondaLockLocker(tool, channels, tmp_path / "cache", no_wheels).lock(request, QuietProgress())
    assert moved(ours.conda, theirs.conda) == {}
    assert all(package.url.startswith(CHANNEL_ROOT) for package in theirs.conda)
    assert check_lock(theirs, target, read_records(real_channels.folder, target.channels)) == []

    write_lock(tmp_path, ours)
    path = tmp_path / f"{target.name}.conda-lock.yml"
    parsed = parse_conda_lock_file(path)
    rendered = render_lockfile_for_platform(
        lockfile=parsed, include_dev_dependencies=False, extras=None, kind="explicit", platform="linux-64"
    )
    told = [line.partition("#")[0] for line in rendered if line.startswith("http")]
    assert sorted(told) == sorted(package.url for package in ours.conda)
    assert sorted(told) == sorted(line.partition("#")[0] for line in explicit(ours).splitlines()[2:])
    write_conda_lock_file(parsed, tmp_path / "again-lock.yml", None)
    again = parse_conda_lock_file(tmp_path / "again-lock.yml")
    again.alphasort_inplace()
    assert again == parsed
    assert {one.name: one.hash.sha256 for one in parsed.package} == {
        package.name: package.sha256 for package in ours.conda
    }
    assert needed_first(ours, [line.partition("#")[0] for line in explicit(ours).splitlines()[2:]])


def needed_first(lock: Lock, addresses: list[str]) -> bool:
    """Whether Python stands before all that needs it, in an explicit list."""
    place_of = {address: index for index, address in enumerate(addresses)}
    by_name: dict[str, LockedCondaPackage] = {package.name: package for package in lock.conda}
    python = place_of[by_name["python"].url]
    needing = [one for one in lock.conda if any(spec.split()[0] == "python" for spec in one.depends)]
    return bool(needing) and all(place_of[one.url] > python for one in needing)
