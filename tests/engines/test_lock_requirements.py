"""Python locks by uv, from an index of our own."""

from __future__ import annotations

import hashlib
import shutil
import sys
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest

from imagefactory.errors import LockError, UnsolvableError, extra_hint
from imagefactory.lock import LockRequest
from imagefactory.lock.changes import content_hash
from imagefactory.lock.download import PackageCache
from imagefactory.lock.pypi.requirements import format_lock, parse_lock
from imagefactory.lock.pypi.uv import UvLocker
from imagefactory.model import Lock, LockedWheel, ReleaseCutoff, Target
from imagefactory.progress import QuietProgress
from tests.made.errors import fails
from tests.made.values import make_base, make_target
from tests.services.package_index import Index, package_index
from tests.services.package_index import uv_locker as locker


def fetch_all(folder: Path, uv: UvLocker, lock: Lock) -> dict[LockedWheel, Path]:
    def locate(missing: tuple[LockedWheel, ...]) -> dict[str, str]:
        return uv.addresses(replace(lock, wheels=missing))

    return PackageCache(folder, uv._index).fetch(lock.wheels, locate, QuietProgress())


BASE = make_base()
TARGET = make_target(requirements=("torch==2.3.1", "numpy"), constraints=("numpy<2",))


@pytest.fixture
def index(tmp_path: Path) -> Iterator[Index]:
    with package_index(tmp_path / "index") as index:
        index.add("torch", "2.3.1", needs=("numpy", "nvidia-cuda-runtime-cu12==12.1.105"))
        index.add("nvidia-cuda-runtime-cu12", "12.1.105", tag="py3-none-manylinux1_x86_64")
        index.add("numpy", "1.26.3")
        index.add("numpy", "2.0.0")
        yield index


REQUEST = LockRequest(target=TARGET, base=BASE)


def versions(lock: Lock) -> dict[str, str]:
    return {wheel.name: wheel.version for wheel in lock.wheels}


@pytest.mark.parametrize("hashes", ["sha256", ""])
def test_files_that_the_index_no_longer_has_are_listed(index: Index, tmp_path: Path, hashes: str) -> None:
    lock = locker(index, tmp_path).lock(REQUEST, QuietProgress())
    index.hashes = hashes

    def gone() -> list[str]:
        return [wheel.name for wheel in locker(index, tmp_path).unavailable(lock)]

    index.requests.clear()
    assert gone() == []
    assert not [line for line in index.requests if line.startswith("GET /files/")]
    index.hidden.update(index.rows["numpy"])
    del index.rows["torch"]
    assert gone() == ["numpy", "torch"]
    here = locker(index, tmp_path, url="http://127.0.0.1:1/simple")
    with pytest.raises(LockError):
        here.unavailable(lock)


@pytest.mark.parametrize("as_json", [False, True], ids=["html", "json"])
def test_a_target_is_locked(index: Index, tmp_path: Path, as_json: bool) -> None:
    index.json = as_json
    uv = locker(index, tmp_path)
    lock = uv.lock(REQUEST, QuietProgress())
    assert versions(lock) == {"numpy": "1.26.3", "nvidia-cuda-runtime-cu12": "12.1.105", "torch": "2.3.1"}
    for one in lock.wheels:
        data = (index.folder / one.filename).read_bytes()
        assert (one.size, one.sha256) == (len(data), hashlib.sha256(data).hexdigest())
    assert (lock.target, lock.python, lock.platform) == (TARGET.name, "3.11", "manylinux_2_36_x86_64")
    assert lock.solver == f"uv {uv.require()}"
    assert lock.content_hash == content_hash(TARGET, BASE, None)
    assert parse_lock(format_lock(lock), "x") == lock
    assert locker(index, tmp_path).lock(REQUEST, QuietProgress()) == lock
    assert "127.0.0.1" not in format_lock(lock)


def test_a_newer_release_does_not_move_a_lock(index: Index, tmp_path: Path) -> None:
    uv = locker(index, tmp_path)
    lock = uv.lock(REQUEST, QuietProgress())
    index.add("numpy", "1.26.4")
    assert uv.lock(replace(REQUEST, previous=lock), QuietProgress()) == lock
    with fails("cuda-version-mismatch", message="12.4"):
        uv.lock(replace(REQUEST, previous=lock, target=replace(TARGET, cuda="12.4")), QuietProgress())


def test_only_what_must_move_moves(index: Index, tmp_path: Path) -> None:
    uv = locker(index, tmp_path)
    lock = uv.lock(REQUEST, QuietProgress())
    for name, version in (("numpy", "1.26.4"), ("extra", "1.0"), ("extra", "1.1")):
        index.add(name, version)
    more = replace(TARGET, requirements=(*TARGET.requirements, "extra"))
    stale = uv.lock(replace(REQUEST, previous=lock, target=more), QuietProgress())
    assert versions(stale) == versions(lock) | {"extra": "1.1"}
    assert stale.content_hash != lock.content_hash
    bound = replace(TARGET, constraints=("numpy!=1.26.3", "numpy<2"))
    assert (
        versions(uv.lock(replace(REQUEST, previous=lock, target=bound), QuietProgress()))["numpy"] == "1.26.4"
    )


def test_updates(index: Index, tmp_path: Path) -> None:
    uv = locker(index, tmp_path)
    wide = replace(TARGET, requirements=("torch==2.3.1", "numpy", "extra"))
    index.add("extra", "1.0")
    lock = uv.lock(replace(REQUEST, target=wide), QuietProgress())
    index.add("numpy", "1.26.4")
    index.add("extra", "1.1")
    held = replace(REQUEST, target=wide, previous=lock)
    assert versions(uv.lock(replace(held, update=("NumPy",)), QuietProgress())) == versions(lock) | {
        "numpy": "1.26.4"
    }
    everything = versions(uv.lock(replace(held, update_all=True), QuietProgress()))
    assert everything == versions(lock) | {"numpy": "1.26.4", "extra": "1.1"}
    with fails("update-package-unknown", message="'nunpy'") as caught:
        uv.lock(replace(held, update=("nunpy",)), QuietProgress())
    assert caught.value.hint == "did you mean 'numpy'?"
    with fails("update-package-unknown"):
        uv.lock(replace(REQUEST, update=("numpy",)), QuietProgress())


def test_a_previous_files_name_follows_the_target(index: Index, tmp_path: Path) -> None:
    uv = locker(index, tmp_path)
    lock = uv.lock(REQUEST, QuietProgress())
    renamed = uv.lock(replace(REQUEST, previous=replace(lock, target="old")), QuietProgress())
    assert renamed == lock


@pytest.mark.parametrize(
    ("changed", "code", "value", "hint"),
    [
        ({"requirements": ("torch==9.9",)}, "requirements-conflict", "torch==9.9", "change"),
        (
            {"requirements": ("torch==2.3.1", "numpy>=2")},
            "requirements-conflict",
            "numpy>=2 and numpy<2",
            "numpy==2.0.0",
        ),
        (
            {"requirements": ("torch==2.3.1", "source-only")},
            "package-source-unusable",
            "source-only",
            "./wheels/",
        ),
        ({"requirements": ("torch==2.3.1", "musl-only")}, "no-usable-wheel", "musl-only", "wheel"),
        ({"cuda": "12.4"}, "cuda-version-mismatch", "CUDA 12.1", 'write cuda: ["12.1"]'),
        (
            {"framework": "numpy", "version": "1.26", "requirements": ("numpy",)},
            "cuda-missing",
            "numpy 1.26.3",
            "nvidia",
        ),
        ({"platform": "linux/s390x"}, "lock-platform-unsupported", "linux/s390x", "linux/amd64"),
    ],
)
def test_what_cannot_be_locked(
    index: Index, tmp_path: Path, changed: dict[str, object], code: str, value: str, hint: str
) -> None:
    index.add("musl-only", "1.0", tag="cp311-cp311-musllinux_1_2_x86_64")
    (index.folder / "source-only-1.0.tar.gz").write_bytes(b"")
    index.publish("source-only", "source-only-1.0.tar.gz")
    with fails(code, message=(value, TARGET.name), hint=hint) as caught:
        locker(index, tmp_path).lock(replace(REQUEST, target=replace(TARGET, **changed)), QuietProgress())  # type: ignore[arg-type]
    assert len(caught.value.message) < 900


def test_no_index_is_said_without_its_password(index: Index, tmp_path: Path) -> None:
    uv = locker(index, tmp_path, url="http://bob:hunter2@127.0.0.1:9/simple")
    with fails("index-unreachable") as caught:
        uv.lock(REQUEST, QuietProgress())
    assert "hunter2" not in caught.value.message + caught.value.hint
    assert "http://127.0.0.1:9/simple ($IMAGEFACTORY_INDEX)" in caught.value.hint


def test_an_index_that_tells_no_hashes_is_hashed_by_uv(index: Index, tmp_path: Path) -> None:
    index.hashes = ""
    uv = locker(index, tmp_path)
    lock = uv.lock(REQUEST, QuietProgress())
    assert {wheel.name: wheel.sha256 for wheel in lock.wheels} == {
        wheel.name: hashlib.sha256((index.folder / wheel.filename).read_bytes()).hexdigest()
        for wheel in lock.wheels
    }
    fetch_all(tmp_path / "cache", uv, lock)
    index.hashes = "sha512"
    with fails("hash-not-published"):
        locker(index, tmp_path).lock(REQUEST, QuietProgress())


@pytest.mark.parametrize("as_json", [False, True], ids=["html", "json"])
def test_an_index_with_a_password_from_lock_to_wheels(index: Index, tmp_path: Path, as_json: bool) -> None:
    index.password, index.json = "p@ss", as_json
    uv = locker(index, tmp_path, url=index.url.replace("://", "://bob:p%40ss@"))
    lock = uv.lock(REQUEST, QuietProgress())
    assert "p@ss" not in format_lock(lock)
    assert "bob" not in format_lock(lock)
    paths = fetch_all(tmp_path / "cache", uv, lock)
    assert {path.name for path in paths.values()} == {wheel.filename for wheel in lock.wheels}
    index.hidden.update(index.rows["numpy"])  # the projects' pages are asked with the password too
    with pytest.raises(LockError):
        uv.addresses(lock)


def test_a_better_wheel_that_came_later_changes_nothing(index: Index, tmp_path: Path) -> None:
    uv = locker(index, tmp_path)
    lock = uv.lock(REQUEST, QuietProgress())
    for tag in ("cp311-cp311-manylinux_2_17_x86_64", "cp311-abi3-manylinux_2_28_x86_64"):
        index.add("numpy", "1.26.3", tag=tag)
    old = next(wheel for wheel in lock.wheels if wheel.name == "numpy")
    assert uv.addresses(lock)[old.filename].endswith("/files/numpy-1.26.3-py3-none-any.whl")
    index.add("extra", "1.0")
    more = replace(TARGET, requirements=(*TARGET.requirements, "extra"))
    assert old in uv.lock(replace(REQUEST, previous=lock, target=more), QuietProgress()).wheels
    fresh = uv.lock(REQUEST, QuietProgress())
    best = next(wheel for wheel in fresh.wheels if wheel.name == "numpy")
    assert best.filename == "numpy-1.26.3-cp311-cp311-manylinux_2_17_x86_64.whl"


def test_a_yanked_version_is_still_found(index: Index, tmp_path: Path) -> None:
    uv = locker(index, tmp_path)
    lock = uv.lock(REQUEST, QuietProgress())
    index.yanked.update(index.rows["numpy"])
    assert len(uv.addresses(lock)) == 3
    index.add("numpy", "1.26.4")
    assert versions(locker(index, tmp_path).lock(REQUEST, QuietProgress()))["numpy"] == "1.26.4"


def test_a_file_that_uv_does_not_list_is_found_by_its_hash(index: Index, tmp_path: Path) -> None:
    """A site whose uv.toml hides new uploads can still build what was locked elsewhere."""
    uv = locker(index, tmp_path)
    lock = uv.lock(REQUEST, QuietProgress())
    hidden = next(wheel for wheel in lock.wheels if wheel.name == "numpy")
    other = replace(hidden, filename="numpy-1.26.3-cp310-cp310-manylinux1_x86_64.whl")
    (index.folder / other.filename).write_bytes(b"another file of the same version, not for this Python")
    index.publish("numpy", other.filename)
    digest = index.hash(other.filename)
    moved = replace(lock, wheels=(replace(other, sha256=digest), *lock.wheels[1:]))
    assert uv.addresses(moved)[other.filename].endswith(f"/files/{other.filename}")


def test_a_file_that_is_gone_or_changed_is_said(index: Index, tmp_path: Path) -> None:
    uv = locker(index, tmp_path)
    index.add("numpy", "1.26.3", tag="cp311-cp311-manylinux_2_17_x86_64")
    lock = uv.lock(REQUEST, QuietProgress())
    gone = next(wheel for wheel in lock.wheels if wheel.name == "numpy")
    index.hidden.add(gone.filename)
    with fails("locked-file-gone", message=gone.filename) as caught:
        uv.addresses(lock)
    assert caught.value.hint == "run imagefactory lock pytorch-2.3-cu121 --upgrade-package numpy"
    index.hidden.update(index.rows["numpy"])
    with fails("locked-file-gone", hint="--upgrade-package"):
        uv.addresses(lock)
    index.hidden.clear()
    index.lies[gone.filename] = "0" * 64
    with fails("index-file-changed", message=gone.filename):
        uv.addresses(lock)


def test_an_index_of_files(index: Index, tmp_path: Path) -> None:
    for name in index.rows:
        page = tmp_path / "site" / "simple" / name / "index.html"
        page.parent.mkdir(parents=True)
        page.write_text(index.page(name)[1].replace("../../files/", f"{index.folder.as_uri()}/"))
    uv = locker(index, tmp_path, url=(tmp_path / "site/simple").as_uri())
    lock = uv.lock(REQUEST, QuietProgress())
    fetch_all(tmp_path / "cache", uv, lock)
    assert index.requests == []


def test_uv_toml_beside_or_above_the_work_folder_has_no_say(
    index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "uv.toml").write_text('index-url = "http://127.0.0.1:9/simple"\nno-index = true\n')
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    assert len(locker(index, tmp_path).lock(REQUEST, QuietProgress()).wheels) == 3


def test_without_uv_the_command_that_installs_it_is_named(
    index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "uv", None)
    with fails("extra-not-installed") as caught:
        locker(index, tmp_path).lock(REQUEST, QuietProgress())
    assert caught.value.hint == extra_hint("build")


def test_a_lock_is_a_requirements_file(index: Index, tmp_path: Path) -> None:
    """An installer takes its pins and hashes without imagefactory (pip: tests/engines/test_lock_uv.py)."""
    uv = locker(index, tmp_path)
    lock = uv.lock(REQUEST, QuietProgress())
    path, into = tmp_path / "lock.txt", tmp_path / "got"
    path.write_text(format_lock(lock))
    command = [
        "pip",
        "install",
        "--require-hashes",
        "--no-deps",
        f"--target={into}",
        f"--requirements={path}",
    ]
    command.append(f"--python={sys.executable}")
    done = uv._run(command)
    assert done.returncode == 0, done.stderr
    assert len(list(into.glob("*.dist-info"))) == len(lock.wheels)
    path.write_text(format_lock(lock).replace(lock.wheels[0].sha256, "0" * 64))
    shutil.rmtree(into)
    assert "Hash mismatch" in uv._run(command).stderr


# --- a target on another -------------------------------------------------------------------------

ON = replace(
    TARGET,
    name="mylab-2.3-cu121",
    family="mylab",
    on=TARGET.name,
    requirements=(*TARGET.requirements, "extra"),
)


def test_a_target_on_another_keeps_every_wheel_of_it(index: Index, tmp_path: Path) -> None:
    """Also where the index has newer and better files by now, and no longer offers a locked one."""
    uv = locker(index, tmp_path)
    under = uv.lock(REQUEST, QuietProgress())
    index.add("numpy", "1.26.4")
    index.add("numpy", "1.26.3", tag="cp311-cp311-manylinux_2_17_x86_64")
    index.yanked.add("numpy-1.26.3-py3-none-any.whl")
    index.add("extra", "1.0", needs=("numpy",))
    lock = uv.lock(LockRequest(target=ON, base=BASE, under=under), QuietProgress())
    assert versions(lock) == versions(under) | {"extra": "1.0"}
    assert set(under.wheels) < set(lock.wheels)
    assert lock.wheels == tuple(sorted(lock.wheels, key=lambda wheel: wheel.name))
    assert (lock.target, lock.platform) == (ON.name, under.platform)
    assert parse_lock(format_lock(lock), "x") == lock
    again = LockRequest(target=ON, base=BASE, under=under, previous=lock)
    assert uv.lock(again, QuietProgress()) == lock


def test_what_lies_below_decides(index: Index, tmp_path: Path) -> None:
    uv = locker(index, tmp_path)
    under = uv.lock(REQUEST, QuietProgress())
    index.add("extra", "1.0")
    request = LockRequest(target=ON, base=BASE, under=under)
    lock = uv.lock(request, QuietProgress())
    index.add("numpy", "1.26.4")
    index.add("extra", "1.1")
    moved = uv.lock(replace(REQUEST, previous=under, update=("numpy",)), QuietProgress())
    above = uv.lock(replace(request, under=moved, previous=lock), QuietProgress())
    assert versions(above) == versions(lock) | {"numpy": "1.26.4"}
    assert above.content_hash != lock.content_hash
    own = uv.lock(replace(request, previous=lock, update=("extra",)), QuietProgress())
    assert versions(own) == versions(lock) | {"extra": "1.1"}
    assert versions(uv.lock(replace(request, previous=lock, update_all=True), QuietProgress())) == versions(
        own
    )
    with fails("package-from-parent", message="'numpy'") as caught:
        uv.lock(replace(request, previous=lock, update=("numpy",)), QuietProgress())
    assert caught.value.hint == "run imagefactory lock pytorch-2.3-cu121 --upgrade-package numpy"


def test_what_does_not_go_with_what_lies_below(index: Index, tmp_path: Path) -> None:
    uv = locker(index, tmp_path)
    under = uv.lock(REQUEST, QuietProgress())
    index.add("numpy", "1.26.4")
    index.add("extra", "1.0", needs=("numpy>=1.26.4",))
    with pytest.raises(UnsolvableError) as caught:
        uv.lock(LockRequest(target=ON, base=BASE, under=under), QuietProgress())
    assert "extra" in caught.value.message
    assert "numpy==1.26.3" in caught.value.message
    assert "imagefactory lock pytorch-2.3-cu121 --upgrade-package" in caught.value.hint
    assert "No solution found" in caught.value.tree


@pytest.mark.parametrize("as_json", [False, True], ids=["html", "json"])
def test_an_old_release_in_place_of_one_without_a_wheel(index: Index, tmp_path: Path, as_json: bool) -> None:
    """As hydra-core: the newest needs a package that comes as source alone."""
    index.json = as_json
    index.add("hydra-core", "0.11.3")
    index.add("hydra-core", "1.3.2", needs=("antlr==4.9.*",))
    index.add("hydra-core", "2.0rc1")
    (index.folder / "antlr-4.9.3.tar.gz").write_bytes(b"")
    index.publish("antlr", "antlr-4.9.3.tar.gz")
    uv, request = locker(index, tmp_path), replace(REQUEST, target=with_package("hydra-core"))
    lock = uv.lock(request, QuietProgress())
    assert versions(lock)["hydra-core"] == "0.11.3"
    (behind,) = uv.behind(request, lock, QuietProgress())
    assert str(behind) == (
        "hydra-core 0.11.3, where 1.3.2 is the newest: no wheel of antlr 4.9.3 for Python 3.11 on "
        "manylinux_2_36_x86_64"
    )
    assert (behind.accept, behind.named) == ("hydra-core<1.3.2", True)
    accepted = replace(request, target=with_package("hydra-core", behind.accept))
    assert uv.behind(accepted, uv.lock(accepted, QuietProgress()), QuietProgress()) == ()


def test_an_old_release_from_before_a_requirement_was_written(index: Index, tmp_path: Path) -> None:
    """As vllm: the newest is for another version of the framework."""
    index.add("vllm", "0.2.2")
    index.add("vllm", "1.0", needs=("torch==2.4.0",))
    uv, request = locker(index, tmp_path), replace(REQUEST, target=with_package("vllm"))
    (behind,) = uv.behind(request, uv.lock(request, QuietProgress()), QuietProgress())
    assert behind.reason == "it needs torch==2.4.0, the recipe asks for torch==2.3.1"


def with_package(name: str, *constraints: str) -> Target:
    return replace(
        TARGET,
        requirements=(*TARGET.requirements, name),
        constraints=(*TARGET.constraints, *constraints),
    )


def test_the_order_of_the_recipe_decides_as_it_does_for_uv(index: Index, tmp_path: Path) -> None:
    """Of two packages that exclude each other's newest release, the first one gets it."""
    for one, other in (("zeta", "alpha"), ("alpha", "zeta")):
        index.add(one, "1.0")
        index.add(one, "2.0", needs=(f"{other}<2",))
    uv = locker(index, tmp_path)
    for first, second in (("zeta", "alpha"), ("alpha", "zeta")):
        target = replace(TARGET, requirements=(*TARGET.requirements, first, second))
        found = versions(uv.lock(replace(REQUEST, target=target), QuietProgress()))
        assert (found[first], found[second]) == ("2.0", "1.0")


def test_what_a_release_needs_and_does_not_declare_is_locked(index: Index, tmp_path: Path) -> None:
    """The real solver, on known rows: a bound, a companion, and a requirement that nothing else has."""
    index.add("torch", "2.2.2", needs=("numpy", "triton==2.2.0", "nvidia-cuda-runtime-cu12==12.1.105"))
    index.add("triton", "2.2.0")
    for name, version in (("setuptools", "80.0"), ("torchaudio", "2.2.2"), ("torchaudio", "2.11.0")):
        index.add(name, version)
    target = replace(
        TARGET, version="2.2", requirements=("torch==2.2.*", "torchaudio", "numpy"), constraints=()
    )
    uv, request = locker(index, tmp_path), replace(REQUEST, target=target)
    lock = uv.lock(request, QuietProgress())
    found = versions(lock)
    assert (found["numpy"], found["torchaudio"], found["setuptools"]) == ("1.26.3", "2.2.2", "80.0")
    assert lock.content_hash == content_hash(target, BASE, None)
    assert uv.behind(request, lock, QuietProgress()) == ()
    with fails("requirements-conflict", message=("torch 2.2.2 needs numpy<2", "numpy>=2")):
        uv.lock(replace(request, target=replace(target, constraints=("numpy>=2",))), QuietProgress())


@pytest.mark.parametrize("as_json", [False, True], ids=["html", "json"])
def test_a_near_release_that_is_a_source_alone_is_told_and_can_be_accepted(
    index: Index, tmp_path: Path, as_json: bool
) -> None:
    """As rouge-score, for a package that the recipe names and for one below."""
    index.json = as_json
    index.add("rouge", "0.0.4")
    (index.folder / "rouge-0.1.2.tar.gz").write_bytes(b"")
    index.publish("rouge", "rouge-0.1.2.tar.gz")
    index.add("evaluate", "1.0", needs=("rouge",))
    uv = locker(index, tmp_path)
    for name, asked in (("rouge", True), ("evaluate", False)):
        request = replace(REQUEST, target=with_package(name))
        (behind,) = uv.behind(request, uv.lock(request, QuietProgress()), QuietProgress())
        assert (behind.name, behind.locked, behind.newest) == ("rouge", "0.0.4", "0.1.2")
        assert (behind.named, behind.build, behind.accept) == (asked, "rouge==0.1.2", "rouge<0.1.2")
    accepted = replace(REQUEST, target=with_package("rouge", "rouge<0.1.2"))
    assert uv.behind(accepted, uv.lock(accepted, QuietProgress()), QuietProgress()) == ()


def test_what_a_locked_package_bounds_needs_no_question(index: Index, tmp_path: Path) -> None:
    index.add("numpy", "3.0.0")
    index.add("numba", "1.0", needs=("numpy<2; extra == 'x'", "llvm"), extras=("x",))
    index.add("llvm", "1.0", needs=("numpy<2",))
    uv = locker(index, tmp_path)
    for names, told in ((("numba[x]",), []), (("llvm",), []), (("numba",), ["numpy"])):
        target = replace(TARGET, requirements=(*TARGET.requirements, *names), constraints=())
        request = replace(REQUEST, target=target)
        lock = uv.lock(request, QuietProgress())
        assert versions(lock)["numpy"] == "1.26.3"
        index.requests.clear()
        behind = uv.behind(request, lock, QuietProgress())
        assert [one.name for one in behind] == told
        assert [one for one in behind if one.named] == []


def test_two_cudas_are_refused_with_what_brings_each(index: Index, tmp_path: Path) -> None:
    index.add("nvidia-cublas-cu13", "13.0", tag="py3-none-manylinux1_x86_64")
    index.add("other", "1.0", needs=("nvidia-cublas-cu13",))
    with fails("cuda-runtime-conflict") as caught:
        locker(index, tmp_path).lock(replace(REQUEST, target=with_package("other")), QuietProgress())
    for part in ("CUDA 12", "torch", "CUDA 13", "other"):
        assert part in caught.value.message


def test_what_contradicts_is_named_and_a_change_was_solved(index: Index, tmp_path: Path) -> None:
    index.add("torch", "2.0.1")
    index.add("vision", "0.15", needs=("torch==2.0.1",))
    index.add("vision", "0.18", needs=("torch==2.3.1",))
    index.add("idle", "1.0")
    target = replace(TARGET, requirements=(*TARGET.requirements, "idle", "vision==0.15"))
    with pytest.raises(UnsolvableError) as caught:
        locker(index, tmp_path).lock(replace(REQUEST, target=target), QuietProgress())
    assert caught.value.conflict == ("torch==2.3.1", "vision==0.15")
    assert "vision==0.18" in caught.value.hint
    assert "idle" not in caught.value.message
    assert "No solution found" in caught.value.tree


def test_releases_after_the_cutoff_are_not_locked(index: Index, tmp_path: Path) -> None:
    index.json = True
    index.add("numpy", "1.26.9")
    for files in index.rows.values():
        index.uploaded |= dict.fromkeys(files, "2026-01-01T00:00:00Z")
    index.uploaded["numpy-1.26.9-py3-none-any.whl"] = "2026-11-26T00:00:00.5Z"
    cutoff = ReleaseCutoff(time=datetime(2026, 11, 20, tzinfo=UTC))
    uv = locker(index, tmp_path)
    newest = uv.lock(REQUEST, QuietProgress())
    lock = uv.lock(replace(REQUEST, cutoff=cutoff, previous=newest), QuietProgress())
    assert (versions(newest)["numpy"], versions(lock)["numpy"], lock.cutoff) == ("1.26.9", "1.26.3", cutoff)
    named = replace(cutoff, allowed=("numpy",))
    assert versions(uv.lock(replace(REQUEST, cutoff=named), QuietProgress()))["numpy"] == "1.26.9"
    below = replace(REQUEST, cutoff=cutoff, under=newest)
    assert versions(uv.lock(below, QuietProgress()))["numpy"] == "1.26.9"
    (young,) = (wheel for wheel in newest.wheels if wheel.name == "numpy")
    assert list(uv.uploads((young,), newest, TARGET)) == [young.filename]
    assert uv.addresses(replace(newest, cutoff=cutoff)).keys() == {wheel.filename for wheel in newest.wheels}
    index.uploaded.clear()
    with fails("upload-time-missing"):
        locker(index, tmp_path).lock(replace(REQUEST, cutoff=cutoff), QuietProgress())
