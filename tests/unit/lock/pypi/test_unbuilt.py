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

from imagefactory.errors import LockError, UnbuiltError, UsageError
from imagefactory.lock.pypi.index import IndexFile
from imagefactory.lock.pypi.no_wheel import NoWheelError
from imagefactory.lock.pypi.question import PinnedVersions, WheelRequest
from imagefactory.lock.pypi.unbuilt import _bounds_in, require_wheels, sdists_of, without
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
    assert caught.value.hint == f"imagefactory lock {TARGET.name} --build"


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
    with fails(LockError, "package-source-unusable"):
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
