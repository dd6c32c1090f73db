"""All packages of a solution that have no wheel, found round by round."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from packaging.specifiers import SpecifierSet

from imagefactory.errors import LockError, UnbuiltError, UnsolvableError, UsageError
from imagefactory.gpu import knowledge
from imagefactory.lock.pypi.index import IndexFile
from imagefactory.lock.pypi.no_wheel import NoWheelError
from imagefactory.lock.pypi.question import PinnedVersions, WheelRequest
from imagefactory.lock.pypi.requirements import read_lock
from imagefactory.lock.pypi.unbuilt import (
    NoCompanionError,
    _bounds_in,
    companion_needs,
    require_wheels,
    sdists_of,
    solve_companions,
    solve_with_companions,
    without,
)
from imagefactory.model import LockedWheel
from imagefactory.progress import QuietProgress
from tests.made.errors import fails
from tests.made.values import make_lock, make_target

LOCK = make_lock(python="3.11", platform="manylinux_2_36_x86_64", wheels=())
TARGET = make_target(cuda="12.1")


def file(name: str, **more: Any) -> IndexFile:
    return IndexFile(filename=name, url="", sha256="1" * 64, **more)


@dataclass
class Solver:
    """In place of uv: `answer` sees the stubs that there are, by file name."""

    root: Path
    answer: Callable[[set[str]], PinnedVersions]
    files: dict[str, tuple[IndexFile, ...]] = field(default_factory=dict)
    contents: dict[str, dict[str, str]] = field(default_factory=dict)

    def solve(self, question: WheelRequest) -> PinnedVersions:
        stubs = {path.name for path in question.sdists.iterdir()} if question.sdists else set()
        return self.answer(stubs)

    def project(self, name: str, lock: object) -> tuple[IndexFile, ...]:
        return self.files.get(name, ())

    def source(self, file: IndexFile, folder: Path) -> Path:
        path, stem = folder / file.filename, file.filename.removesuffix(".tar.gz")
        with tarfile.open(path, "w:gz") as tar:
            for name, text in self.contents.get(file.filename, {"setup.py": "setup()"}).items():
                info = tarfile.TarInfo(f"{stem}/{name}")
                info.size = len(text)
                tar.addfile(info, io.BytesIO(text.encode()))
        return path


def lacks(*names: str, account: str = "") -> NoWheelError:
    return NoWheelError("no-usable-wheel", "has no usable wheels", hint="", names=names, account=account)


def pins(*lines: str) -> PinnedVersions:
    return PinnedVersions(lines=lines, lacking=())


def question(*requirements: str, sources: tuple[str, ...] = ()) -> WheelRequest:
    return WheelRequest(lock=LOCK, requirements=requirements, sources=sources)


def test_the_list_is_whole_though_the_solver_names_one_at_a_time(tmp_path: Path) -> None:
    def answer(stubs: set[str]) -> PinnedVersions:
        if not stubs:
            raise lacks("first")
        if len(stubs) == 1:
            raise lacks("second-one", account="because first==1.5 depends on second_one==2.* and more")
        return pins("first==1.5", "numpy==1.26.4", "second-one==2.3")

    files = {
        "first": tuple(file(f"first-{one}.tar.gz") for one in ("1.0", "1.5", "3.0", "2.0rc1")),
        "second-one": tuple(file(f"second_one-{one}.tar.gz") for one in ("2.0", "2.3", "3.0")),
    }
    contents = {
        "first-1.5.tar.gz": {
            "PKG-INFO": "Metadata-Version: 2.2\nName: first\nVersion: 1.5\nRequires-Dist: second-one\n"
        }
    }
    solver = Solver(tmp_path, answer, files, contents)
    with pytest.raises(UnbuiltError) as caught:
        require_wheels(solver, question("first<3", "numpy"), TARGET, QuietProgress())
    first, second = caught.value.packages
    assert (first["name"], first["version"], first["source"], first["named"]) == (
        *("first", "1.5", "first-1.5.tar.gz", True),
    )
    assert "second-one" in first["requires"]  # type: ignore[operator]
    assert (second["name"], second["version"], second["named"]) == ("second-one", "2.3", False)
    assert caught.value.pins == ("numpy==1.26.4",)
    assert caught.value.code == "source-build-required"
    assert caught.value.hint == f"run imagefactory lock {TARGET.name} --build"


def test_nothing_is_built_for_a_lock_of_two_cudas(tmp_path: Path) -> None:
    def answer(stubs: set[str]) -> PinnedVersions:
        if not stubs:
            raise lacks("first")
        return pins("first==1.0", "cupy-cuda111==12.3.0", "nvidia-cublas-cu12==12.4")

    solver = Solver(tmp_path, answer, {"first": (file("first-1.0.tar.gz"),)})
    with pytest.raises(LockError) as caught:
        require_wheels(solver, question("first"), TARGET, QuietProgress())
    assert not isinstance(caught.value, UnbuiltError)
    assert caught.value.code == "cuda-runtime-conflict"
    assert "CUDA 11" in caught.value.message


def test_nothing_is_built_for_a_lock_without_cuda(tmp_path: Path) -> None:
    text = "Metadata-Version: 2.2\nName: first\nVersion: 1.0\n"
    framework = f"{TARGET.framework}=={TARGET.version}"

    def code(*came: str) -> str:
        def answer(stubs: set[str]) -> PinnedVersions:
            if not stubs:
                raise lacks("first")
            return pins("first==1.0", framework, *came)

        files, contents = {"first": (file("first-1.0.tar.gz"),)}, {"first-1.0.tar.gz": {"PKG-INFO": text}}
        with pytest.raises(LockError) as caught:
            require_wheels(
                Solver(tmp_path, answer, files, contents), question("first"), TARGET, QuietProgress()
            )
        assert isinstance(caught.value, UnbuiltError) == (came == ("nvidia-cuda-runtime-cu12==12.1.105",))
        return caught.value.code

    assert code() == "cuda-missing"
    assert code("nvidia-cuda-runtime-cu12==12.4.127") == "cuda-version-mismatch"
    assert code("nvidia-cuda-runtime-cu12==12.1.105") == "source-build-required"


def test_what_has_no_sdist_either_is_the_solvers_own_error(tmp_path: Path) -> None:
    def answer(_: set[str]) -> PinnedVersions:
        raise lacks("first")

    with pytest.raises(NoWheelError):
        require_wheels(Solver(tmp_path, answer), question("first"), TARGET, QuietProgress())
    found = {"first": (file("first-1.0.tar.gz"), file("first-2.0.tar.gz"))}
    with pytest.raises(NoWheelError):  # after each of its releases
        require_wheels(Solver(tmp_path, answer, found), question("first"), TARGET, QuietProgress())


def test_a_solution_without_a_stub_is_a_solution(tmp_path: Path) -> None:
    solver = Solver(tmp_path, lambda _: pins("a==1"))
    assert require_wheels(solver, question("a"), TARGET, QuietProgress()) == (question("a"), pins("a==1"))


def test_folders_and_repositories_are_in_the_list(tmp_path: Path) -> None:
    folder = tmp_path / "src" / "lab"
    folder.mkdir(parents=True)
    (folder / "pyproject.toml").write_text('[project]\nname = "lab"\nversion = "0.3"\ndependencies = ["a"]\n')
    git = f"git+https://git.example.org/lab/ops@{'0' * 40}"
    seen: list[set[str]] = []

    def answer(stubs: set[str]) -> PinnedVersions:
        seen.append(stubs)
        return pins("a==1", "lab==0.3")

    asked = question(sources=("./src/lab", git))
    with pytest.raises(UnbuiltError) as caught:
        require_wheels(Solver(tmp_path, answer), asked, TARGET, QuietProgress())
    assert seen == [{"lab-0.3-py3-none-any.whl"}]
    assert [(row["name"], row["source"]) for row in caught.value.packages] == [
        ("", git),
        ("lab", "./src/lab"),
    ]
    assert caught.value.pins == ("a==1",)


@pytest.mark.parametrize("make", [lambda _: None, lambda path: path.symlink_to("/etc"), Path.touch])
def test_a_source_outside_or_that_is_not_there_stops_it(
    tmp_path: Path, make: Callable[[Path], object]
) -> None:
    make(tmp_path / "lab")
    with pytest.raises(UsageError):
        require_wheels(
            Solver(tmp_path, lambda _: pins()), question(sources=("./lab",)), TARGET, QuietProgress()
        )


@pytest.mark.parametrize(
    ("name", "contents", "cuda", "possible", "needs"),
    [
        ("pure", {"setup.py": "setup()"}, "12.1", True, "its build"),
        ("ops", {"setup.py": "", "a.cpp": ""}, "12.1", True, "C++"),
        ("ops", {"setup.py": "", "a.cu": ""}, "12.1", False, "CUDA 13"),
        ("ops", {"setup.py": "", "a.cu": ""}, "13", True, "CUDA compiler"),
        ("ops", {"setup.py": "", "a.cu": ""}, "none", True, "C++"),
        ("flash-attn", {"setup.py": ""}, "12.1", False, "CUDA 13"),
        ("mpi4py", {"setup.py": ""}, "12.1", True, "libopenmpi-dev"),
        (
            "tok",
            {"pyproject.toml": "[build-system]\nrequires = ['maturin']\n", "Cargo.toml": ""},
            *("13", False, "Rust"),
        ),
    ],
)
def test_what_each_needs_is_said_and_nothing_impossible_is_advised(
    tmp_path: Path, name: str, contents: dict[str, str], cuda: str, possible: bool, needs: str
) -> None:
    def answer(stubs: set[str]) -> PinnedVersions:
        if not stubs:
            raise lacks(name)
        return pins(f"{name}==1.0")

    sdist = f"{name.replace('-', '_')}-1.0.tar.gz"
    solver = Solver(tmp_path, answer, {name: (file(sdist),)}, {sdist: contents})
    target = replace(TARGET, cuda=cuda, capabilities=() if cuda == "none" else TARGET.capabilities)
    with pytest.raises(UnbuiltError) as caught:
        require_wheels(solver, question(name), target, QuietProgress())
    (row,) = caught.value.packages
    assert row["possible"] is possible
    assert needs in " ".join(row["needs"])  # type: ignore[arg-type]
    assert ("cannot be built" in caught.value.hint) is not possible


def test_a_source_that_cannot_be_read_is_told(tmp_path: Path) -> None:
    def answer(_: set[str]) -> PinnedVersions:
        raise lacks("ops")

    contents = {"ops-1.0.tar.gz": {"pyproject.toml": "[build-system"}}
    with fails("package-source-unusable"):
        require_wheels(
            Solver(tmp_path, answer, {"ops": (file("ops-1.0.tar.gz"),)}, contents),
            question("ops"),
            TARGET,
            QuietProgress(),
        )


def test_sdists_of_releases_without_a_wheel_for_this_python() -> None:
    files = (
        file("ops-1.0.tar.gz"),
        file("ops-1.1.tar.gz"),
        file("ops-1.1-cp311-cp311-manylinux_2_28_x86_64.whl"),
        file("ops-1.2.tar.gz"),
        file("ops-1.2-cp312-cp312-manylinux_2_28_x86_64.whl"),
        file("ops-1.3.tar.gz", python=">=3.12"),
        file("ops-1.4.tar.gz", yanked=True),
        file("other-1.5.tar.gz"),
    )
    assert sorted(str(version) for version, _ in sdists_of("ops", files, LOCK)) == ["1.0", "1.2"]


def test_bounds_of_the_account_are_tried_together_then_one_by_one() -> None:
    account = (
        "Because a==1 depends on my_ops>=2,<4 and b==2 depends on my-ops[gpu]==3.*, and you require my-ops>1."
    )
    found = _bounds_in("my-ops", account, SpecifierSet("!=3.5"))
    assert found[0] == SpecifierSet("!=3.5,>=2,<4,==3.*,>1")
    assert found[-1] == SpecifierSet("!=3.5")
    assert SpecifierSet("!=3.5,>=2,<4") in found


def test_what_is_absent_is_given_for_a_while() -> None:
    with without(("ops==1.0",), question("numpy")) as asked:
        assert asked.given == ("ops==1.0",)
        assert asked.stubs is not None
        stubs = asked.stubs
        assert [path.name for path in stubs.iterdir()] == ["ops-1.0-py3-none-any.whl"]
    assert not stubs.exists()


ROOT = Path(knowledge.__file__).parents[3]


@dataclass
class NeedsSolver:
    """Answers by `answer`, a function of the constraints and requirements."""

    answer: Callable[[tuple[str, ...]], str]
    asked: list[WheelRequest] = field(default_factory=list)

    def solve(self, question: WheelRequest) -> PinnedVersions:
        self.asked.append(question)
        return PinnedVersions(
            lines=tuple(self.answer((*question.requirements, *question.constraints)).split()), lacking=()
        )


class Notes(QuietProgress):
    def __init__(self) -> None:
        self.told: list[str] = []

    def note(self, text: str) -> None:
        self.told.append(text)


def ask(*requirements: str, **more: object) -> WheelRequest:
    return WheelRequest(lock=make_lock(wheels=()), requirements=requirements, **more)  # type: ignore[arg-type]


def fixed(pin: str) -> LockedWheel:
    name, _, version = pin.partition("==")
    return LockedWheel(name=name, version=version, filename="", sha256="0" * 64, size=1)


@pytest.mark.parametrize(
    ("versions", "needs"),
    [
        ("torch==2.2.2 numpy==2.4.6", {"numpy<2"}),
        ("torch==2.3.0 numpy==2.4.6", set()),
        ("torch==2.2.2", set()),  # nothing needs numpy
        ("torch==2.6.0 triton==3.2.0", {"setuptools"}),
        ("torch==2.7.0 triton==3.3.0", set()),
        ("torch==2.6.0 torchaudio==2.11.0", {"torchaudio==2.6.*"}),
        ("torch==2.6.0+cu124 torchvision==0.21.0", {"torchvision==0.21.*"}),
        ("torch==2.10.0 torchcodec==0.12.0", {"torchcodec<0.11,>=0.10"}),
        ("torch==99.0 torchaudio==2.11.0", set()),  # of which nothing is known
        ("jaxlib==0.4.25 numpy==2.0.0", {"numpy<2"}),
    ],
)
def test_needs_go_by_the_very_versions(versions: str, needs: set[str]) -> None:
    found = companion_needs(dict(pin.split("==") for pin in versions.split()), "3.11")  # type: ignore[misc]
    assert {str(one.wants) for one in found} == needs
    assert all(one.source for one in found)


@pytest.mark.parametrize(
    ("version", "python", "needs"),
    [
        ("2.5.1", "3.13", {"triton==3.1.*"}),
        ("2.5.1+cu118", "3.13", {"triton==3.1.*"}),
        ("2.5.1+cpu", "3.13", set()),
        ("2.5.1", "3.12", set()),  # its wheel asks for Triton itself
        ("2.3.1", "3.12", {"triton==2.3.*"}),
    ],
)
def test_a_need_can_be_of_one_python(version: str, python: str, needs: set[str]) -> None:
    assert {str(one.wants) for one in companion_needs({"torch": version}, python)} == needs


def test_the_shipped_locks_meet_every_need() -> None:
    locks = [read_lock(path) for path in sorted((ROOT / "lockfiles").glob("*.requirements.txt"))]
    assert locks
    for lock in locks:
        versions = {wheel.name: wheel.version for wheel in lock.wheels}
        for need in companion_needs(versions, lock.python):
            assert need.wants.name in versions, (lock.target, need)
            assert need.wants.specifier.contains(versions[need.wants.name]), (lock.target, need)


def test_a_companion_and_a_bound_are_kept_and_told() -> None:
    def answer(asked: tuple[str, ...]) -> str:
        audio = "2.6.0" if "torchaudio==2.6.*" in asked else "2.11.0"
        tools = " setuptools==80.0" if "setuptools" in asked else ""
        return f"torch==2.6.0 triton==3.2.0 torchaudio=={audio}{tools}"

    solver, notes = NeedsSolver(answer), Notes()
    question, pins = solve_with_companions(solver, ask("torch==2.6.*", "torchaudio"), notes)
    assert pins.lines == ("torch==2.6.0", "triton==3.2.0", "torchaudio==2.6.0", "setuptools==80.0")
    assert question.requirements == ("torch==2.6.*", "torchaudio", "setuptools")
    assert question.constraints == ("torchaudio==2.6.*",)
    assert len(notes.told) == 2
    assert solve_with_companions(solver, question, notes) == (question, pins)
    assert len(notes.told) == 2  # which changes nothing, so nothing is told


def test_what_is_below_or_of_conda_decides_and_is_not_bounded() -> None:
    """Companions and bounds hold above a target, or conda's packages, that have the framework."""

    def answer(asked: tuple[str, ...]) -> str:
        tools = " setuptools==80.0" if "setuptools" in asked else ""
        return f"torchaudio=={'2.6.0' if 'torchaudio==2.6.*' in asked else '2.11.0'}{tools}"

    below = (fixed("torch==2.6.0"), fixed("torchvision==0.20.0"), fixed("triton==3.2.0"))
    question, pins = solve_with_companions(
        NeedsSolver(answer), ask("torchaudio", fixed=below), QuietProgress()
    )
    assert pins.lines == ("torchaudio==2.6.0", "setuptools==80.0")
    assert question.constraints == ("torchaudio==2.6.*",)  # not the torchvision below, which is as it is
    assert question.requirements == ("torchaudio", "setuptools")
    given = ("torch==2.6.0+given", "torchvision==0.20.0+given")
    question, pins = solve_with_companions(
        NeedsSolver(answer), ask("torchaudio", given=given), QuietProgress()
    )
    assert (pins.lines, question.constraints) == (("torchaudio==2.6.0",), ("torchaudio==2.6.*",))
    plain = ask("numpy", given=("torch==2.5.1+given",))
    question, _ = solve_with_companions(NeedsSolver(lambda _: "numpy==2.1.0"), plain, QuietProgress())
    assert question.requirements == ("numpy",)  # conda's torch names its Triton itself


def test_a_companion_without_a_release_for_the_framework_stops() -> None:
    solver = NeedsSolver(lambda _: "torch==2.15.0 torchaudio==2.11.0")
    with fails("companion-not-released") as caught:
        solve_with_companions(solver, ask("torch==2.15.*", "torchaudio"), QuietProgress())
    assert caught.value.message.startswith("pytorch-2.3-cu121: torchaudio ")
    assert "torch 2.15.0" in caught.value.message
    assert "2.11" in caught.value.hint


def test_an_open_framework_is_as_old_as_its_companions_need_it() -> None:
    def answer(asked: tuple[str, ...]) -> str:
        return f"torch=={'2.11.0' if 'torch<2.12' in asked else '2.15.0'} torchaudio==2.11.0"

    notes = Notes()
    question, pins = solve_with_companions(NeedsSolver(answer), ask("torchaudio"), notes)
    assert (pins.lines, question.constraints) == (("torch==2.11.0", "torchaudio==2.11.0"), ("torch<2.12",))
    assert len(notes.told) == 1
    assert solve_companions(NeedsSolver(answer), ask("torchaudio"))[:2] == (question, pins)

    def pinned(asked: tuple[str, ...]) -> str:
        if "torch<2.12" in asked:
            raise UnsolvableError("no-solution", "t: No solution found")
        return answer(asked)

    with pytest.raises(NoCompanionError):
        solve_with_companions(NeedsSolver(pinned), ask("torch==2.15.*", "torchaudio"), notes)
    with pytest.raises(NoCompanionError):
        solve_with_companions(NeedsSolver(answer), ask("torchaudio", fixed=(fixed("torch==2.15.0"),)), notes)


def test_a_recipe_that_asks_for_the_contrary_has_no_solution() -> None:
    def answer(asked: tuple[str, ...]) -> str:
        if {"numpy<2", "numpy==2.1.0"} <= {*asked}:
            raise UnsolvableError("no-solution", "t: No solution found", tree="tree")
        return "torch==2.2.2 numpy==2.1.0"

    with fails("requirements-conflict") as caught:
        solve_with_companions(NeedsSolver(answer), ask("torch==2.2.*", "numpy==2.1.0"), QuietProgress())
    for word in ("torch 2.2.2", "numpy<2", "numpy==2.1.0"):
        assert word in caught.value.message
    assert "numpy==2.1.0" in caught.value.hint
    assert caught.value.tree == "tree"
