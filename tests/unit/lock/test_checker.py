"""The checker of locks: it finds every kind of fault, and compares versions and specs as rattler does."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rattler import MatchSpec, PackageRecord
from rattler import Version as RattlerVersion
from rattler.package import BuildString, PackageName
from rattler.version import VersionWithSource

from imagefactory.model import Lock, LockedCondaPackage, Target
from tests.made.conda_lock import LOCK, PYTORCH, TARGET
from tests.made.lock_checker import Record, check_lock, compare, moved, parse_spec, read_records
from tests.made.values import FORGE

# The order that conda's user guide gives as its example, and what channels have beside it.
ORDERED = re.findall(
    r"\S+",
    "0.4 0.4.1.rc 0.4.1 0.5a1 0.5b3 0.5C1 0.5 0.9.6 0.960923 1.0 1.1dev1 1.1_ 1.1a1 1.1.0dev1 1.1.a1 "
    "1.1.0rc1 1.1.0 1.1.0post1 1.1post1 1996.07.12 1!0.4.1 1!3.1.1.6 2!0.4.1",
)
EQUAL = (("0.4", "0.4.0"), ("0.4.1.rc", "0.4.1.RC"), ("1.1.0dev1", "1.1.dev1"), ("1.1.0post1", "1.1.post1"))


def test_versions_stand_in_the_order_of_the_guide() -> None:
    for one, other in itertools.pairwise(ORDERED):
        assert compare(one, other) < 0, (one, other)
        assert compare(other, one) > 0
    for one, other in EQUAL:
        assert compare(one, other) == 0
    assert compare("1.0+cu118", "1.0+cu121") < 0


VERSIONS = st.from_regex(
    r"([1-9]!)?[0-9]{1,2}([._]?([0-9]{1,2}|a|b|rc|dev|post|h)){0,4}(\+cu[0-9]{2})?", fullmatch=True
)
BOUNDS = st.builds(
    lambda operator, version, star: f"{operator}{version}{star}",
    st.sampled_from(["", "==", "!=", "<=", ">=", "<", ">"]),
    st.from_regex(r"[0-9]{1,2}(\.[0-9]{1,2}){0,2}", fullmatch=True),
    st.just(""),
) | st.from_regex(r"(!=)?[0-9]{1,2}(\.[0-9]{1,2}){0,2}\.\*", fullmatch=True)


@given(VERSIONS, VERSIONS)
def test_versions_compare_as_rattler_compares_them(one: str, other: str) -> None:
    ours, theirs = RattlerVersion(one), RattlerVersion(other)
    assert compare(one, other) == (ours > theirs) - (ours < theirs)


# Three numbers at least: rattler takes 0a for a version of 0.0.*, which the guide does not.
LONG = st.from_regex(r"([1-9]!)?[0-9]{1,2}(\.[0-9]{1,2}){2,3}(rc[0-9]|post1|\.dev1)?", fullmatch=True)


@given(LONG, st.lists(st.lists(BOUNDS, min_size=1, max_size=2).map(",".join), min_size=1, max_size=2))
def test_specs_match_as_rattler_matches_them(version: str, bounds: list[str]) -> None:
    text = f"a {'|'.join(bounds)}"
    assert parse_spec(text).fits(version, "0") == MatchSpec(text).matches(record_of(version, "0")), text


@pytest.mark.parametrize("spec", ["a 1.* cuda*", "a * *_cp311", "a ==1.0 h_0", "a=1.0=h_0", "a >=1 *", "a"])
@pytest.mark.parametrize("build", ["cuda121_0", "4_cp311", "h_0", "cpu"])
def test_builds_match_as_rattler_matches_them(spec: str, build: str) -> None:
    assert parse_spec(spec).fits("1.0", build) == MatchSpec(spec).matches(record_of("1.0", build))


def record_of(version: str, build: str) -> PackageRecord:
    return PackageRecord(
        name=PackageName("a"),
        version=VersionWithSource(version),
        build=BuildString(build),
        build_number=0,
        subdir="linux-64",
        arch=None,
        platform=None,
    )


def test_what_it_cannot_read_is_no_yes() -> None:
    for spec in ("a[build=x]", "a >>1", "a 1.*.2"):
        with pytest.raises(ValueError, match="this checker reads"):
            parse_spec(spec).fits("1.0", "0")


# --- locks ---------------------------------------------------------------------------------------


def records_of(lock: Lock) -> dict[str, Record]:
    return {
        one.url: Record(
            url=one.url,
            channel=one.url.rsplit("/", 2)[0],
            name=one.name,
            version=one.version,
            build=one.build,
            sha256=one.sha256,
            md5=one.md5,
            size=one.size,
            depends=one.depends,
            constrains=(),
        )
        for one in lock.conda
    }


def packaged(name: str) -> LockedCondaPackage:
    return next(one for one in LOCK.conda if one.name == name)


HELD = replace(TARGET, requirements=(*TARGET.requirements, "pip"))
Case = Callable[[dict[str, Record]], tuple[Lock, Target]]


def changed(records: dict[str, Record], package: str, **fields: object) -> tuple[Lock, Target]:
    """The lock as it is, a record of its channel in another way."""
    url = packaged(package).url
    records[url] = replace(records[url], **fields)  # type: ignore[arg-type]
    return LOCK, HELD


def without(package: str) -> Lock:
    return replace(LOCK, conda=tuple(one for one in LOCK.conda if one.name != package))


def beside(records: dict[str, Record], package: str, channel: str) -> tuple[Lock, Target]:
    """A package of the lock stands in another channel too."""
    record = records[packaged(package).url]
    records[f"{channel}/x"] = replace(record, url=f"{channel}/x", channel=channel, version="0")
    return LOCK, HELD


FAULTS: dict[str, tuple[Case, str]] = {
    "missing": (lambda _: (without("numpy"), HELD), "needs numpy >=1.19,<2, and there is none"),
    "not in the channel": (
        lambda r: (LOCK, HELD) if r.pop(packaged("pip").url) else (LOCK, TARGET),
        "pip-24.0-pyhd8ed1ab_0.conda is in no channel",
    ),
    "hash": (lambda r: changed(r, "pip", sha256="0" * 64), "pip: sha256 is "),
    "size": (lambda r: changed(r, "pip", size=5), "pip: size is "),
    "depends left out": (
        lambda r: changed(r, "pip", depends=("python", "setuptools", "wheel")),
        "pip: names of depends is ['python', 'setuptools'], the channel says ['python', 'setuptools', 'wh",
    ),
    "dependency": (
        lambda r: changed(r, "pytorch", depends=("numpy <1.20", "python", "pytorch-cuda")),
        "pytorch 2.3.1 py3.11_cuda12.1_cudnn8.9.2_0 needs numpy <1.20, and there is 1.26.4",
    ),
    "constraint": (
        lambda r: changed(r, "pip", constrains=("numpy <1.20", "absent >5")),
        "constrains numpy <1.20",
    ),
    "virtual": (lambda r: changed(r, "cuda-cudart", depends=("__glibc >=2.39",)), "needs __glibc >=2.39"),
    "no virtual": (
        lambda r: changed(r, "cuda-cudart", depends=("__glibc", "__osx")),
        "needs __osx, and there is",
    ),
    "virtual constrained": (
        lambda r: changed(r, "cuda-cudart", constrains=("__cuda >=12.4",)),
        "constrains __cuda >=12.4, and there is 12.1 0",
    ),
    "archspec": (
        lambda r: changed(r, "cuda-cudart", depends=("__glibc", "__archspec 1 x86_64_v3")),
        "needs __archspec 1 x86_64_v3, and there is 1 x86_64",
    ),
    "requirement": (
        lambda _: (LOCK, replace(HELD, requirements=(*HELD.requirements, "pytorch 2.4.*"))),
        "the recipe needs pytorch 2.4.*, and there is 2.3.1",
    ),
    "python": (lambda _: (LOCK, replace(HELD, python="3.12")), "the recipe needs python 3.12.*"),
    "recipe's constraint": (
        lambda _: (LOCK, replace(HELD, constraints=("numpy <1.20", "absent 1.*"))),
        "the recipe constrains numpy <1.20",
    ),
    "priority": (
        lambda r: beside(r, "numpy", PYTORCH),
        f"numpy comes from {FORGE}, but {PYTORCH} is asked first",
    ),
    "channel of its own": (
        lambda _: (LOCK, replace(HELD, requirements=(*HELD.requirements, "pytorch::numpy"))),
        "numpy was asked from pytorch and comes from",
    ),
    "system": (
        lambda _: (LOCK, replace(HELD, virtual=(("__cuda", "12.4"),))),
        "its system or channels are not",
    ),
    "superfluous": (lambda _: (LOCK, TARGET), "nothing needs pip"),
    "twice": (
        lambda _: (replace(LOCK, conda=(*LOCK.conda, LOCK.conda[0])), HELD),
        "_libgcc_mutex stands twice",
    ),
}


def test_a_lock_that_holds() -> None:
    assert check_lock(LOCK, HELD, records_of(LOCK)) == []


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found(name: str) -> None:
    case, what = FAULTS[name]
    records = records_of(LOCK)
    lock, target = case(records)
    faults = check_lock(lock, target, records)
    assert any(what in fault for fault in faults), faults


def test_without_strict_priority_any_channel_will_do() -> None:
    records = records_of(LOCK)
    beside(records, "numpy", PYTORCH)
    assert check_lock(LOCK, replace(HELD, priority="disabled"), records) == []


def test_records_are_read_from_a_folder_of_channels(tmp_path: Path) -> None:
    channel = "https://conda.anaconda.org/nvidia/label/cuda-12.1.0"
    row = {"name": "a", "version": "1", "build": "0", "depends": ["b"], "sha256": "0", "md5": "1", "size": 3}
    for subdir, packages in (("linux-64", {"a-1-0.tar.bz2": row}), ("noarch", {})):
        folder = tmp_path / "nvidia" / "label" / "cuda-12.1.0" / subdir
        folder.mkdir(parents=True)
        (folder / "repodata.json").write_text(json.dumps({"packages": packages}))
    records = read_records(tmp_path, [channel])
    assert [(one.url, one.depends) for one in records.values()] == [
        (f"{channel}/linux-64/a-1-0.tar.bz2", ("b",))
    ]


def test_what_moved() -> None:
    pip = packaged("pip")
    newer = replace(pip, version="24.1", url="x")
    assert moved((pip, LOCK.conda[0]), (newer, LOCK.conda[0])) == {
        "pip": ("24.0 pyhd8ed1ab_0", "24.1 pyhd8ed1ab_0")
    }
    assert moved((), (pip,)) == {"pip": ("", "24.0 pyhd8ed1ab_0")}
