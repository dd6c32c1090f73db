"""Conda locks and pairs of lock files: the format, what is refused, staleness, the explicit list."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from imagefactory.errors import LockError
from imagefactory.extras.nightly.night import last_commit
from imagefactory.gpu.values import built_for
from imagefactory.lock.changes import base_moves, content_hash, lock_moves, publisher_changes
from imagefactory.lock.conda.facts import cuda_version
from imagefactory.lock.conda.file import MAX_BYTES, format_conda_lock, merge_depends, parse_conda_lock
from imagefactory.lock.files import (
    UnsolvableTarget,
    check_facts,
    explicit,
    format_lock_files,
    format_unsolvable,
    former_locks,
    lock_digest,
    lock_names,
    lock_path,
    parse_unsolvable,
    read_lock,
    read_unsolvable,
    remove_unsolvable,
    write_lock,
    write_unsolvable,
)
from imagefactory.lock.pypi.requirements import format_lock
from imagefactory.model import BaseLock, DebianPackage, Lock, LockedWheel, ReleaseCutoff
from tests.made.conda_lock import BASE, LOCK, PYTORCH, TARGET
from tests.made.errors import fails
from tests.made.values import FORGE, hexed, make_conda, make_lock, make_target

WHEEL = LockedWheel(
    name="einops", version="0.8.1", filename="einops-0.8.1-py3-none-any.whl", sha256=hexed("w"), size=64359
)
MIXED = replace(LOCK, solver="py-rattler 0.28.0, uv 0.13.9", wheels=(WHEEL,))
TEXT = format_conda_lock(LOCK)

# --- the file ------------------------------------------------------------------------------------


def test_the_text_of_a_lock() -> None:
    lines = TEXT.splitlines()
    assert lines[1] == "# To make it anew: imagefactory lock pytorch-conda-2.3-cu121"
    start = lines.index("- name: pytorch")
    url = f"{PYTORCH}/linux-64/pytorch-2.3.1-py3.11_cuda12.1_cudnn8.9.2_0.conda"
    package = LOCK.conda[6]
    assert yaml.safe_load("\n".join(lines[start : start + 18]))[0] == {
        "name": "pytorch",
        "version": "2.3.1",
        "manager": "conda",
        "platform": "linux-64",
        "dependencies": {"numpy": ">=1.19,<2", "python": ">=3.11", "pytorch-cuda": ">=12.1,<12.2"},
        "url": url,
        "hash": {"md5": package.md5, "sha256": package.sha256},
        "build": "py3.11_cuda12.1_cudnn8.9.2_0",
        "category": "main",
        "optional": False,
    }


def test_yaml_reads_every_scalar_as_the_text_it_was() -> None:
    """Versions, hashes and names that YAML would make into numbers, truths or nothing."""
    odd = replace(
        LOCK,
        conda=tuple(
            replace(make_conda(spec), sha256=digit * 64, md5=digit * 32)
            for spec, digit in (("1e3 1.0 0", "1"), ("null 1e5 1_0", "0"), ("y 0x10 1e3", "e"))
        ),
    )
    read = yaml.safe_load(format_conda_lock(odd))
    for told, package in zip(read["package"], odd.conda, strict=True):
        assert (told["name"], told["version"], told["build"]) == (
            package.name,
            package.version,
            package.build,
        )
        assert told["hash"] == {"md5": package.md5, "sha256": package.sha256}
    assert parse_conda_lock(format_conda_lock(odd), "x") == odd


def test_round_trip() -> None:
    assert parse_conda_lock(TEXT, "x") == LOCK
    assert format_conda_lock(parse_conda_lock(TEXT, "x")) == TEXT
    metadata = yaml.safe_load(TEXT)["metadata"]
    assert metadata["content_hash"] == {"linux-64": LOCK.content_hash.removeprefix("sha256:")}
    assert metadata["sources"] == ["recipes/pytorch-conda.yaml"]
    assert metadata["channels"][0] == {"url": PYTORCH, "used_env_vars": []}
    assert metadata["custom_metadata"]["imagefactory.system"] == "__archspec=x86_64 __cuda=12.1 __glibc=2.36"


@pytest.mark.parametrize("note", ["", "locked from a trimmed copy: 'not built'", "# ü: - {x} 100%", "yes"])
def test_round_trip_of_notes(note: str) -> None:
    text = format_conda_lock(replace(LOCK, note=note))
    assert parse_conda_lock(text, "x").note == note
    assert yaml.safe_load(text)["metadata"]["custom_metadata"].get("imagefactory.note", "") == note
    assert (f"# Note: {note}" in text) == bool(note)


def test_a_channel_without_md5_is_told() -> None:
    lock = replace(LOCK, conda=(replace(LOCK.conda[0], md5=""), *LOCK.conda[1:]))
    text = format_conda_lock(lock)
    assert parse_conda_lock(text, "x") == lock
    assert "# 1 of them have no md5, so conda-lock does not read this file" in text


def test_a_folder_and_a_port_as_channels() -> None:
    channels = ("file:///srv/channels/own", "http://127.0.0.1:8765/a/label/b")
    packages = tuple(
        make_conda(f"{name} 1.0 0", channel=one) for name, one in zip("ab", channels, strict=True)
    )
    lock = replace(LOCK, channels=channels, conda=packages)
    assert parse_conda_lock(format_conda_lock(lock), "x") == lock


@pytest.mark.parametrize(
    ("depends", "merged"),
    [
        (["python >=3.10", "python"], ["python >=3.10"]),
        (["python *", "pip"], ["pip", "python"]),
        (["hdf5 * nompi_*", "hdf5 >=1.12.2,<1.12.3.0a0"], ["hdf5 >=1.12.2,<1.12.3.0a0 nompi_*"]),
        (["a <2", "a >=1", "a >=1"], ["a <2,>=1"]),
        (["a >=1", "a 1.*|2.*"], ["a (1.*|2.*),>=1"]),
        (["a ==1 h_0", "a * h_*"], ["a ==1 h_0"]),
        (["numpy>=1.8, <2 ", " b"], ["b", "numpy >=1.8,<2"]),
    ],
)
def test_one_spec_a_name(depends: list[str], merged: list[str]) -> None:
    assert list(merge_depends(depends)) == merged
    assert merge_depends(merged) == tuple(merged)


FAULTS: Mapping[str, tuple[Callable[[str], str], str, str]] = {
    "empty": (lambda t: "", "", "'version: ...'"),
    "format of conda-lock": (
        lambda t: t.replace("version: 1\n", "version: 2\n", 1),
        "version: 2",
        "format 2",
    ),
    "format": (lambda t: t.replace("lock: '1'", "lock: '2'"), ".lock: ", "format 2"),
    "cut in a line": (lambda t: t[:-9], "  optiona", "last line"),
    "cut at a package": (lambda t: t[: t.index("- name: setuptools")], "", "setuptools"),
    "cut in a package": (lambda t: t[: t.index("  category")], "", "'  category: main'"),
    "nothing": (
        lambda t: t[: t.index("- name: _")].replace("      ", "      #"),
        "      #",
        "'#_libgcc_mutex",
    ),
    "carriage returns": (lambda t: t.replace("\n", "\r\n"), "version: 1", "after 'version:'"),
    "too large": (lambda t: t + "#" * MAX_BYTES, "#", "too large"),
    "alias": (lambda t: t.replace("  version: '0.1'", "  version: &a '0.1'"), "&a", "&a"),
    "document": (lambda t: t + "---\n", "---", "'- name: ...'"),
    "comment": (lambda t: t.replace("package:\n", "# x\npackage:\n"), "# x", "expected"),
    "edited comment": (lambda t: t.replace("# To make", "# to make"), "# to make", "expected"),
    "target": (lambda t: t.replace("target: pytorch", "target: ../x"), "../x", "../x"),
    "hash": (lambda t: re.sub(r"linux-64: .*", "linux-64: abc", t, count=1), "64: abc", "'abc'"),
    "name": (lambda t: t.replace("name: numpy", "name: ../numpy"), "../numpy", "../numpy"),
    "twice": (lambda t: t.replace("name: pip\n", "name: numpy\n"), "name: numpy", "'numpy' is"),
    "order": (lambda t: t.replace("name: pip\n", "name: a\n"), "name: a", "'a' must"),
    "version": (lambda t: t.replace("version: '24.0'", "version: '24.1'"), "url", "pip 24.1"),
    "build": (
        lambda t: t.replace("build: pyhd8ed1ab_0", "build: other_0", 1),
        "url",
        "pip 24.0 other",
    ),
    "other channel": (
        lambda t: t.replace(f"url: {FORGE}/noarch/pip", "url: https://evil.invalid/noarch/pip"),
        "evil",
        "https://evil.invalid/noarch/pip",
    ),
    "credentials": (
        lambda t: t.replace("url: https://conda.anaconda.org/pytorch", "url: https://a:b@conda.invalid/p"),
        "a:b@",
        "https://conda.invalid/p",
    ),
    "token": (lambda t: t.replace("org/pytorch", "org/t/abc/pytorch"), "/t/", "/t/abc"),
    "leaves its channel": (
        lambda t: t.replace("noarch/pip", "noarch/../pip"),
        "/../",
        "noarch/../pip",
    ),
    "other platform": (
        lambda t: t.replace("linux-64/pip", "win-64/pip").replace("noarch/pip", "win-64/pip"),
        "win-64",
        "linux-64",
    ),
    "no sha256": (lambda t: re.sub(r"    sha256: .*\n", "", t, count=1), "  build", "'sha256: ...'"),
    "upper case": (
        lambda t: t.replace(LOCK.conda[0].sha256, LOCK.conda[0].sha256.upper()),
        "sha256",
        "after 'sha256:'",
    ),
    "no size": (lambda t: re.sub(r"      pip-.*\n", "", t), "url", "imagefactory.sizes"),
    "size of nothing": (
        lambda t: t.replace("      pip-24", "      pil-1.0-0.conda 5\n      pip-24"),
        "",
        "pil-1.0-0.conda",
    ),
    "sizes out of order": (
        lambda t: re.sub(r"(      pip-.*\n)(      pyth.*\n)", r"\2\1", t),
        "      pyth",
        "'      pip-24",
    ),
    "pip package": (lambda t: t.replace("manager: conda", "manager: pip", 1), "manager", "expected"),
    "dependency": (lambda t: t.replace("'>=3.7'", '"\\x1b[31m"'), "x1b", "expected"),
    "quotes": (lambda t: t.replace("python: '>=3.7'", "'python': '>=3.7'"), "'python'", "'python:"),
    "note": (
        lambda t: t.replace(".sizes", ".note: a\u202eb\n    imagefactory.sizes"),
        "note",
        "the note",
    ),
    "unknown key": (lambda t: t.replace("  category", "  x: 1\n  category", 1), "x: 1", "expected"),
    "python": (
        lambda t: t.replace("python: '3.11'", "python: 3.11"),
        "n: 3.11",
        'expected "    imagefactory',
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_malformed_lock_is_refused_by_file_and_line(name: str) -> None:
    spoil, place, what = FAULTS[name]
    text = spoil(TEXT)
    assert text != TEXT
    with fails("lock-malformed") as caught:
        parse_conda_lock(text, "lockfiles/x.conda-lock.yml")
    found = re.match(r"lockfiles/x\.conda-lock\.yml:([0-9]+): ", caught.value.message)
    assert found, caught.value.message
    assert place in [*text.split("\n"), ""][int(found[1]) - 1]
    assert what in caught.value.message
    assert caught.value.hint.startswith("run imagefactory lock ")
    assert caught.value.exit_code == 5


@given(st.data())
def test_no_edit_goes_unseen(data: st.DataObject) -> None:
    """Any character changed, taken or added is refused, or is another lock written as locks are."""
    at = data.draw(st.integers(0, len(TEXT) - 1))
    put = data.draw(st.sampled_from(["", "0", "a", " ", "\n", "'", "-", "&", "\t", "é", "\x00"]))
    text = TEXT[:at] + put + TEXT[at + data.draw(st.integers(0, 2)) :]
    try:
        again = format_conda_lock(parse_conda_lock(text, "x"))
    except LockError as error:
        again = error.message
    assert again == text or re.match(r"x:[0-9]+: ", again)


# --- pairs on the disk ---------------------------------------------------------------------------


def test_names() -> None:
    assert lock_names("a-1-cu12", conda=False) == ("a-1-cu12.requirements.txt",)
    assert lock_names("a-1-cu12", conda=True) == ("a-1-cu12.conda-lock.yml", "a-1-cu12.requirements.txt")
    assert lock_path(Path("l"), TARGET) == Path("l/pytorch-conda-2.3-cu121.conda-lock.yml")


NAMED = replace(MIXED, origins=((MIXED.wheels[0].name, "lab"),))
PUBLISHED = replace(NAMED, publishers=((MIXED.wheels[0].name, "GitHub a/b c.yml"),))


@pytest.mark.parametrize("lock", [LOCK, MIXED, replace(MIXED, note="tried"), NAMED, PUBLISHED])
def test_what_is_written_is_read(tmp_path: Path, lock: Lock) -> None:
    assert read_lock(tmp_path, TARGET) is None
    write_lock(tmp_path, lock)
    assert read_lock(tmp_path, TARGET) == lock
    texts = format_lock_files(lock)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {
        f"{TARGET.name}.{suffix}": text for suffix, text in texts.items()
    }
    # Publishers change no image.
    unpublished = format_lock_files(replace(lock, publishers=())).values()
    assert lock_digest(lock) == "sha256:" + hexed("".join(unpublished))


def test_publishers_are_compared_by_name_where_a_wheel_stays() -> None:
    wheel, *_ = MIXED.wheels
    newer = replace(PUBLISHED, wheels=(replace(wheel, version="9", sha256="9" * 64),))
    assert (publisher_changes(None, PUBLISHED), publisher_changes(PUBLISHED, newer)) == ((), ())
    other = replace(newer, publishers=((wheel.name, "GitHub x/b c.yml"),))
    (change,) = publisher_changes(PUBLISHED, other)
    assert (change.name, change.before, change.after) == (wheel.name, "GitHub a/b c.yml", "GitHub x/b c.yml")
    lost = replace(newer, publishers=())
    (move,) = (move for move in lock_moves(PUBLISHED, lost) if move.name == wheel.name)
    assert move.publisher == replace(change, after="")
    assert len(move.lines) == 3
    assert publisher_changes(PUBLISHED, replace(lost, wheels=())) == ()  # it is removed
    assert publisher_changes(lost, newer) == ()  # a first one is not a change


def test_a_lock_of_wheels_keeps_its_one_file_and_digest(tmp_path: Path) -> None:
    target = replace(TARGET, name="pytorch-2.3-cu121", source="pypi", channels=(), virtual=())
    lock = replace(MIXED, target=target.name, solver="uv 0.13.9", conda=(), channels=(), virtual=())
    write_lock(tmp_path, lock)
    assert [path.name for path in tmp_path.iterdir()] == ["pytorch-2.3-cu121.requirements.txt"]
    assert read_lock(tmp_path, target) == lock
    assert lock_digest(lock) == "sha256:" + hexed(format_lock(lock))


def test_what_could_not_be_read_again_is_not_written(tmp_path: Path) -> None:
    odd = replace(LOCK.conda[0], depends=("größe >=1",))
    with fails("channel-record-invalid", message="öße >=1"):
        write_lock(tmp_path, replace(LOCK, conda=(odd, *LOCK.conda[1:])))
    assert list(tmp_path.iterdir()) == []


def test_files_that_are_no_part_any_more_go(tmp_path: Path) -> None:
    write_lock(tmp_path, MIXED)
    write_lock(tmp_path, LOCK)
    assert [path.name for path in tmp_path.iterdir()] == [f"{TARGET.name}.conda-lock.yml"]
    write_lock(tmp_path, replace(MIXED, conda=(), channels=(), virtual=(), solver="uv 0.13.9"))
    assert [path.name for path in tmp_path.iterdir()] == [f"{TARGET.name}.requirements.txt"]


def test_a_pair_that_does_not_belong_together_is_refused(tmp_path: Path) -> None:
    write_lock(tmp_path, MIXED)
    wheels = tmp_path / f"{TARGET.name}.requirements.txt"
    kept = wheels.read_text()
    wheels.write_text(kept.replace(WHEEL.sha256, hexed("other")))
    with fails("lock-files-mismatch") as caught:
        read_lock(tmp_path, TARGET)
    assert str(wheels) in caught.value.message
    wheels.unlink()
    with fails("lock-files-mismatch", message=wheels.name) as caught:
        read_lock(tmp_path, TARGET)
    write_lock(tmp_path, LOCK)
    wheels.write_text(kept)
    with fails("lock-files-mismatch") as caught:
        read_lock(tmp_path, TARGET)
    assert str(wheels) in caught.value.message
    assert caught.value.hint.endswith(f"imagefactory lock {TARGET.name}")


def test_unreadable_bytes_are_told_by_line(tmp_path: Path) -> None:
    path = tmp_path / f"{TARGET.name}.conda-lock.yml"
    path.write_bytes(b"version: 1\n\xff\n")
    with fails("lock-malformed", message=f"{path}:2: ") as caught:
        read_lock(tmp_path, TARGET)
    assert caught.value.hint == f"run imagefactory lock {TARGET.name}"


# --- what makes a lock stale ---------------------------------------------------------------------


def test_what_decides_a_solution() -> None:
    same = [
        replace(TARGET, requirements=TARGET.requirements[::-1], virtual=TARGET.virtual[::-1]),
        replace(TARGET, description="other", checks=("import",), name="x", environment=(("A", "b"),)),
    ]
    other = [
        replace(TARGET, requirements=(*TARGET.requirements, "numpy")),
        replace(TARGET, constraints=()),
        replace(TARGET, channels=TARGET.channels[::-1]),
        replace(TARGET, priority="disabled"),
        replace(TARGET, virtual=(("__cuda", "12.4"),)),
        replace(TARGET, pip=("einops",)),
        replace(TARGET, python="3.12"),
    ]
    wanted = content_hash(TARGET, BASE, None)
    assert {content_hash(one, BASE, None) for one in same} == {wanted}
    newer = replace(BASE, glibc="2.41")
    assert content_hash(TARGET, newer, None) == wanted  # `system` says which one conda's packages count on
    wheels = replace(TARGET, source="pypi", channels=())
    assert content_hash(wheels, newer, LOCK) != content_hash(wheels, BASE, LOCK)
    hashes = [content_hash(one, BASE, None) for one in other] + [content_hash(TARGET, BASE, LOCK)]
    assert len({*hashes, wanted}) == len(hashes) + 1


def test_targets_of_wheels_keep_their_hash() -> None:
    target = replace(TARGET, source="pypi", channels=())
    kept = "sha256:e812b964c010ce868039485b9b9d210d0fdf10ab3cbf8e397fcb18a8221f0769"
    assert content_hash(target, BASE, None) == content_hash(replace(target, pip=()), BASE, None) == kept
    assert content_hash(target, BASE, MIXED) != kept


def test_only_the_packages_below_count() -> None:
    """A note or a newer solver of the lock below makes nothing above it stale."""
    told = replace(MIXED, note="tried", solver="py-rattler 1.0, uv 1.0", content_hash="sha256:" + "0" * 64)
    assert content_hash(TARGET, BASE, told) == content_hash(TARGET, BASE, MIXED)
    assert content_hash(TARGET, BASE, LOCK) != content_hash(TARGET, BASE, MIXED)


# --- the explicit list ---------------------------------------------------------------------------


def test_explicit_names_what_is_needed_first() -> None:
    lines = explicit(LOCK).splitlines()
    assert lines[:2] == ["# platform: linux-64", "@EXPLICIT"]
    pattern = re.compile(r"(\S+/(\S+?)-[0-9][^-]*-[^-]+\.conda)#sha256:([0-9a-f]{64})")
    found = [pattern.fullmatch(line) for line in lines[2:]]
    names = [one[2] for one in found if one]
    assert sorted(names) == [package.name for package in LOCK.conda]
    assert names.index("_libgcc_mutex") < names.index("python") < names.index("numpy")
    assert names.index("pytorch-cuda") < names.index("pytorch")


def test_explicit_of_a_circle() -> None:
    packages = (make_conda("a 1 0", "b"), make_conda("b 1 0", "a", "c"), make_conda("c 1 0"))
    lines = explicit(replace(LOCK, conda=packages)).splitlines()[2:]
    assert [line.rpartition("/")[2][0] for line in lines] == ["c", "b", "a"]


# --- what a lock must hold -----------------------------------------------------------------------


def swapped(spec: str, *more: str, without: str = "") -> Lock:
    """LOCK with one package in another version or build, `more` added and one taken."""
    packages = {one.name: one for one in LOCK.conda}
    packages |= {one.split()[0]: make_conda(one) for one in (spec, *more)}
    packages.pop(without, None)
    return replace(LOCK, conda=tuple(packages[name] for name in sorted(packages)))


def test_facts_that_hold() -> None:
    check_facts(LOCK, TARGET)
    check_facts(LOCK, replace(TARGET, cuda="12"))
    assert cuda_version(LOCK) == "12.1"


def test_a_build_for_an_older_minor_runs_with_newer_libraries() -> None:
    lock = swapped("pytorch 2.3.1 cuda120_py311h1_300", "cuda-cudart 12.6.77 h_0", "cuda-version 12.6 h_3")
    lock = replace(lock, conda=tuple(one for one in lock.conda if one.name != "pytorch-cuda"))
    check_facts(lock, replace(TARGET, cuda="12.6"))
    with fails("cuda-version-mismatch", message="cuda-cudart 12.6.77") as caught:
        check_facts(lock, TARGET)
    assert caught.value.hint == (
        'write cuda: ["12.6"] at recipes/pytorch-conda.yaml:7:5, or add the constraint "cuda-version 12.1.*"'
    )


MISFITS = {
    "cpu": (swapped("pytorch 2.3.1 py3.11_cpu_0"), "cpu-build-locked", "pytorch 2.3.1 py3.11_cpu_0"),
    "cpu below": (
        swapped("pytorch 2.3.1 h1_0", "libtorch 2.3.1 cpu_generic_h1_0"),
        "cpu-build-locked",
        "libtorch 2.3.1 cpu_generic_h1_0",
    ),
    "framework": (swapped("numpy 1.0 0", without="pytorch"), "framework-not-locked", "'pytorch'"),
    "version": (swapped("pytorch 2.30.0 py3.11_cuda12.1_0"), "framework-version-mismatch", "2.3"),
    "python": (swapped("python 3.12.1 h_0"), "lock-recipe-mismatch", "python 3.12.1 h_0"),
    "no python": (swapped("numpy 1.0 0", without="python"), "lock-recipe-mismatch", "no python"),
    "runtime": (swapped("cuda-cudart 12.4.127 0"), "cuda-version-mismatch", "cuda-cudart 12.4.127 0"),
    "two runtimes": (swapped("cudatoolkit 12.1.1 h_0"), "cuda-runtime-conflict", "cudatoolkit 12.1.1 h_0"),
    "a runtime from PyPI": (
        replace(LOCK, wheels=(replace(WHEEL, name="nvidia-cuda-runtime-cu12", version="12.9.79"),)),
        "cuda-runtime-conflict",
        "nvidia-cuda-runtime-cu12 12.9.79 from PyPI",
    ),
    "build": (
        swapped("pytorch 2.3.1 py3.11_cuda11.8_cudnn8_0"),
        "cuda-version-mismatch",
        "CUDA 11.8 (pytorch 2.3.1 py3.11_cuda11.8_cudnn8_0)",
    ),
    "no cuda": (
        replace(LOCK, conda=tuple(make_conda(s) for s in ("python 3.11.9 h_0", "pytorch 2.3.1 h_0"))),
        "cuda-missing",
        "pytorch 2.3.1 h_0",
    ),
    "bounds alone": (
        replace(
            LOCK,
            conda=tuple(
                make_conda(s) for s in ("cuda-version 12.1 h_3", "python 3.11.9 h_0", "pytorch 2.3.1 h_0")
            ),
        ),
        "cuda-missing",
        "pytorch 2.3.1 h_0",
    ),
}


def test_what_asks_for_a_build_for_the_cpu_is_named() -> None:
    packages = {one.name: one for one in swapped("pytorch 2.3.1 py3.11_cpu_0").conda}
    for one in (
        make_conda("torchdata 0.4.0 py311_0", "helper"),
        make_conda("helper 1.0 0", "cpuonly", "pytorch"),
        make_conda("cpuonly 2.0 0", "pytorch-mutex 1.0 cpu"),
    ):
        packages[one.name] = one
    lock = replace(LOCK, conda=tuple(packages[name] for name in sorted(packages)))
    target = replace(TARGET, requirements=(*TARGET.requirements, "torchdata"))
    with fails("cpu-build-locked", message="torchdata 0.4.0 -> helper 1.0 -> cpuonly") as caught:
        check_facts(lock, target)
    assert "torchdata" in (caught.value.hint or "")


@pytest.mark.parametrize(
    ("build", "asked"), [("py3.11_cuda11.8_cudnn8_0", "*cuda12.1*"), ("cuda118_py311_1", "*cuda121*")]
)
def test_another_build_is_asked_as_its_channel_writes_it(build: str, asked: str) -> None:
    with pytest.raises(LockError) as caught:
        check_facts(swapped(f"pytorch 2.3.1 {build}"), TARGET)
    assert f'"pytorch * {asked}"' in caught.value.hint


@pytest.mark.parametrize("name", MISFITS)
def test_a_lock_that_is_not_what_its_target_names(name: str) -> None:
    lock, code, value = MISFITS[name]
    with fails(code, message=value) as caught:
        check_facts(lock, TARGET)
    assert caught.value.hint


@pytest.mark.parametrize(
    ("build", "word"),
    [
        ("py3.11_cuda12.1_cudnn8.9.2_0", "12.1"),
        ("py3.8_cuda11.0.221_cudnn8.0.5_0", "11.0"),
        ("cuda126_py312h1763f6d_306", "12.6"),
        ("cuda112py310h457873b_1", "11.2"),
        ("cuda129_mkl_py311_h6b7d41d_305", "12.9"),
        ("cuda92_py36_0", "9.2"),
        ("cuda12_0", "12"),
        ("cpu_mkl_py312hf462abe_109", "cpu"),
        ("py36_cpuh7097a09_4", "cpu"),
        ("mkl_py311h1_0", "cpu"),
        ("py312had87585_1", ""),
        ("pyhd8ed1ab_0", ""),
        ("cudnn8_0", ""),
    ],
)
def test_what_a_build_string_says(build: str, word: str) -> None:
    assert built_for(build) == word


# --- what cannot be solved -----------------------------------------------------------------------

WHY = UnsolvableTarget(
    target=TARGET.name,
    content_hash=LOCK.content_hash,
    reason="pytorch 2.3.* needs numpy >=1.19\n└─ pytorch\n   └─ numpy\n\nnumpy <1.0 was asked",
    hint="change `numpy <1.0` at recipes/x.yaml:7:5",
    tree="Cannot solve the request because of:\n├─ pytorch\n\n└─ numpy",
)


def test_a_record_of_what_cannot_be_solved(tmp_path: Path) -> None:
    assert read_unsolvable(tmp_path, TARGET) is None
    write_unsolvable(tmp_path, WHY)
    assert read_unsolvable(tmp_path, TARGET) == WHY
    assert parse_unsolvable(format_unsolvable(replace(WHY, tree="")), "x") == replace(WHY, tree="")
    write_lock(tmp_path, LOCK)
    assert read_unsolvable(tmp_path, TARGET) is None
    remove_unsolvable(tmp_path, TARGET.name)


def test_a_record_holds_nothing_that_a_terminal_acts_on(tmp_path: Path) -> None:
    write_unsolvable(tmp_path, replace(WHY, reason="no \x1b[31mway", tree="a\x07b"))
    record = read_unsolvable(tmp_path, TARGET)
    assert record is not None
    assert (record.reason, record.tree) == ("no [31mway", "ab")


def test_a_malformed_record_is_refused() -> None:
    text = format_unsolvable(WHY)
    for spoiled, line in (
        ("", 1),
        (text.replace("sha256:", ""), 3),
        (text.split("# why")[0], 5),
        (text + "\x1b[31m\n", 15),
    ):
        with fails("lock-malformed") as caught:
            parse_unsolvable(spoiled, "x")
        assert caught.value.message.startswith(f"x:{line}: ")


def test_a_conda_target_for_cpus_has_no_build_for_gpus() -> None:
    cpu = replace(
        TARGET, cuda="none", capabilities=(), virtual=tuple(p for p in TARGET.virtual if p[0] != "__cuda")
    )
    lock = replace(LOCK, virtual=cpu.virtual)
    with fails("gpu-package-unwanted", message="cuda: [none]"):
        check_facts(lock, cpu)
    kept = [one for one in LOCK.conda if one.name in ("python", TARGET.framework)]
    built = [replace(one, build="cpu_py311h0_0") if one.name == TARGET.framework else one for one in kept]
    check_facts(replace(lock, conda=tuple(built), wheels=()), cpu)


WHEELS_LOCK = make_lock()


IDNA, TORCH = WHEELS_LOCK.wheels


def told(*wheels: LockedWheel) -> list[str]:
    return [str(one) for one in lock_moves(WHEELS_LOCK, replace(WHEELS_LOCK, wheels=wheels))]


def test_what_stays_does_not_move() -> None:
    assert told(IDNA, TORCH) == []


def test_each_kind_of_move_is_told() -> None:
    assert told(replace(IDNA, version="3.8", sha256="3" * 64), TORCH) == ["idna 3.7 -> 3.8"]
    assert told(replace(IDNA, sha256="3" * 64), TORCH) == ["idna 3.7 -> 3.7, new file"]
    assert told(TORCH) == ["idna 3.7 (gone)"]
    assert told(IDNA, replace(IDNA, name="jinja2"), TORCH) == ["jinja2 3.7 (new)"]


def test_of_a_lock_that_was_not_there_all_is_new() -> None:
    assert [str(one) for one in lock_moves(None, WHEELS_LOCK)] == ["idna 3.7 (new)", "torch 2.3.1 (new)"]


def test_a_base_moves_by_the_packages_of_debian() -> None:
    gcc = DebianPackage(name="gcc", version="12.2", architecture="amd64", sha256="1" * 64, size=1)
    before = BaseLock(
        base="debian-12", suite="bookworm", content_hash="", source_date_epoch=1, packages=(gcc,)
    )
    after = replace(before, packages=(replace(gcc, version="12.2+deb12u1", sha256="2" * 64),))
    assert [str(one) for one in base_moves(before, after)] == ["gcc 12.2 -> 12.2+deb12u1"]
    assert base_moves(before, replace(before, source_date_epoch=2)) == ()


IDENTITY = ("-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "commit.gpgsign=false")


def git(folder: Path, *arguments: str) -> None:
    subprocess.run(["git", "-C", str(folder), *IDENTITY, *arguments], check=True, capture_output=True)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A repository whose locks lie in a folder of their own."""
    git(tmp_path, "init", "-q")
    (tmp_path / "lockfiles").mkdir()
    return tmp_path / "lockfiles"


def commit(folder: Path, day: str) -> None:
    git(folder, "add", "-A", "..")
    when = f"{day}T12:00:00Z"
    subprocess.run(
        ["git", "-C", str(folder), *IDENTITY, "commit", "-q", "-m", "x", "--date", when],
        check=True,
        capture_output=True,
        env={"GIT_COMMITTER_DATE": when, "PATH": "/usr/bin:/bin", "HOME": str(folder)},
    )


def wheel(version: str) -> LockedWheel:
    return LockedWheel(
        name="one",
        version=version,
        filename=f"one-{version}-py3-none-any.whl",
        sha256=("1" if version == "1.0" else "2") * 64,
        size=1,
    )


def test_the_lock_before_the_present_one_is_found(folder: Path) -> None:
    target = make_target()
    old = replace(make_lock(), target=target.name, wheels=(wheel("1.0"),))
    new = replace(old, wheels=(wheel("2.0"),))
    write_lock(folder, old)
    commit(folder, "2026-11-01")
    (folder.parent / "README").write_text("another commit, of no lock")
    commit(folder, "2026-11-02")
    write_lock(folder, new)
    commit(folder, "2026-11-03")
    found = former_locks(folder, [target])
    assert set(found) == {target.name}
    assert found[target.name].day == "2026-11-03"
    assert [str(move) for move in lock_moves(found[target.name].lock, new)] == ["one 1.0 -> 2.0"]


def test_a_first_lock_has_none_before_it(folder: Path) -> None:
    target = make_target()
    write_lock(folder, replace(make_lock(), target=target.name))
    commit(folder, "2026-11-01")
    assert former_locks(folder, [target]) == {}


def test_one_that_cannot_be_read_any_more_is_passed_over(folder: Path) -> None:
    target = make_target()
    lock = replace(make_lock(), target=target.name)
    write_lock(folder, lock)
    (path,) = folder.iterdir()
    text = path.read_text()
    path.write_text("of another time\n")
    commit(folder, "2026-11-01")
    path.write_text(text)
    commit(folder, "2026-11-02")
    assert former_locks(folder, [target]) == {}


def test_outside_of_a_repository_there_is_none(tmp_path: Path) -> None:
    assert former_locks(tmp_path, [make_target()]) == {}
    assert former_locks(tmp_path / "nowhere", [make_target()]) == {}


@pytest.mark.parametrize("look", [last_commit, lambda folder: former_locks(folder, [make_target()])])
def test_the_settings_of_a_repository_run_no_program(folder: Path, look: Callable[[Path], object]) -> None:
    """A clone that came as an archive has a .git/config of its maker's."""
    ran, evil = folder.parent / "ran", folder.parent / "evil"
    evil.write_text(f"#!/bin/sh\ntouch {ran}\n")
    evil.chmod(0o755)
    write_lock(folder, replace(make_lock(), target=make_target().name))
    commit(folder, "2026-01-01")
    text = subprocess.run(
        ["git", "-C", folder, "cat-file", "commit", "HEAD"], check=True, capture_output=True, text=True
    ).stdout
    head, _, message = text.partition("\n\n")
    signed = f"{head}\ngpgsig -----BEGIN PGP SIGNATURE-----\n \n -----END PGP SIGNATURE-----\n\n{message}"
    made = subprocess.run(
        ["git", "-C", folder, "hash-object", "-t", "commit", "-w", "--stdin"],
        input=signed,
        check=True,
        capture_output=True,
        text=True,
    )
    git(folder, "update-ref", "HEAD", made.stdout.strip())
    for name in ("gpg.program", "core.fsmonitor", "core.pager", "core.sshCommand"):
        git(folder, "config", name, str(evil))
    git(folder, "config", "log.showSignature", "true")
    subprocess.run(["git", "-C", folder, "log", "-1"], check=False, capture_output=True)
    assert ran.exists()  # so git itself would
    ran.unlink()
    look(folder)
    assert not ran.exists()


def test_what_a_partial_clone_lacks_is_not_fetched(folder: Path) -> None:
    """It would be by a program of its configuration, which can allow every protocol."""
    ran, evil = folder.parent / "ran", folder.parent / "evil"
    evil.write_text(f"#!/bin/sh\ntouch {ran}\n")
    evil.chmod(0o755)
    lock = replace(make_lock(), target=make_target().name)
    for day, one in (("2026-01-01", lock), ("2026-01-02", replace(lock, solver="uv 9"))):
        write_lock(folder, one)
        commit(folder, day)
    git(folder.parent, "init", "-q", "--bare", "away")
    for name, value in (
        ("core.repositoryFormatVersion", "1"),
        ("extensions.partialClone", "origin"),
        ("remote.origin.url", str(folder.parent / "away")),
        ("remote.origin.promisor", "true"),
        ("remote.origin.uploadpack", str(evil)),
        ("protocol.file.allow", "always"),
    ):
        git(folder, "config", name, value)
    name = next(path.name for path in folder.iterdir() if path.is_file())
    gone = subprocess.run(
        ["git", "-C", folder, "rev-parse", f"HEAD~1:./{name}"], check=True, capture_output=True, text=True
    ).stdout.strip()
    (folder.parent / ".git/objects" / gone[:2] / gone[2:]).unlink()
    subprocess.run(["git", "-C", folder, "cat-file", "-e", gone], check=False, capture_output=True)
    assert ran.exists()  # so git itself would
    ran.unlink()
    assert former_locks(folder, [make_target()]) == {}
    assert not ran.exists()


def test_a_pair_keeps_its_cutoff_in_the_conda_file(tmp_path: Path) -> None:
    cutoff = ReleaseCutoff(time=datetime(2026, 11, 21, 4, 5, 6, tzinfo=UTC), allowed=("einops",))
    for lock in (replace(LOCK, cutoff=cutoff), replace(MIXED, cutoff=cutoff)):
        write_lock(tmp_path, lock)
        assert read_lock(tmp_path, TARGET) == lock
    text = format_conda_lock(replace(LOCK, cutoff=cutoff))
    with fails("lock-malformed"):
        parse_conda_lock(text.replace("04:05:06Z", "4:05"), "x")


def test_a_cooldown_is_part_of_the_content_hash_only_if_it_is_set() -> None:
    hashes = {content_hash(replace(TARGET, cooldown=text), BASE, None) for text in ("", "7 days", "8 days")}
    assert len(hashes) == 3
    assert content_hash(TARGET, BASE, None) in hashes
