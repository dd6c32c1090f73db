"""What a person reads of a build."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from imagefactory.actions.build import BuildResult
from imagefactory.actions.transfer import CopyResult, PushResult
from imagefactory.model import CheckResult, CheckState, Outcome, Report
from imagefactory.oci.manifests import Image
from imagefactory.oci.store import ImageReference
from imagefactory.oci.transfer import TransferResult
from imagefactory.views.images import format_built, format_copied, format_pushed, smoke_line
from tests.made.values import make_target

DIGEST, MANIFEST = "sha256:" + "a" * 64, "sha256:" + "b" * 64
IMAGE = Image(
    name="pytorch:2.3-cu121",
    digest=DIGEST,
    manifest=MANIFEST,
    config="sha256:" + "c" * 64,
    size=1_500_000_000,
    layers=(),
    environment=(),
)


def report(**changes: Any) -> Report:
    states = {"import": CheckState.PASSED, "cuda": CheckState.NOT_APPLICABLE, "packages": CheckState.PASSED}
    given: dict[str, Any] = {
        "target": "pytorch-2.3-cu121",
        "image": DIGEST,
        "config": "",
        "suite": "",
        "passed": True,
        "failure": None,
        "gpu": Outcome.NOT_TESTED,
        "checks": tuple(
            CheckResult(name=name, state=state, detail="", seconds=0.1, numbers=())
            for name, state in states.items()
        ),
        "from_record": False,
    }
    return Report(**{**given, **changes})


def lines(**changes: Any) -> dict[str, str]:
    given: dict[str, Any] = {
        "target": make_target(capabilities=("8.0", "12.0")),
        "image": IMAGE,
        "fresh": True,
        "published_base": True,
        "report": report(),
        "seconds": (("base", 1.25), ("layers", 30.0)),
    }
    told = format_built(BuildResult(**{**given, **changes}), "/store").splitlines()[1:]
    return {line[:13].strip(): line[13:].strip() for line in told}


def test_what_was_emulated_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("imagefactory.gpu.capability.this_platform", lambda: "linux/amd64")
    arm = make_target(platform="linux/arm64")
    assert lines(target=arm)["smoke test"].endswith("2 checks on the CPU, emulated")
    assert lines(target=arm, report=None)["smoke test"] == "not run (--no-test)"
    assert lines()["smoke test"].endswith("2 checks on the CPU")


def test_a_smoke_test_counts_what_passed() -> None:
    assert smoke_line(report()) == "passed inside the image: 2 checks on the CPU"
    assert smoke_line(report(from_record=True)).endswith("2 checks on the CPU, kept from an earlier run")
    assert smoke_line(report(passed=False, failure=Outcome.LOAD_FAILED)) == "FAILED: load-failed"
    assert smoke_line(None) == "not run (--no-test)"


def test_a_build_that_was_not_tried_is_not_tested() -> None:
    told = lines(report=None)
    assert told["smoke test"] == "not run (--no-test)"
    assert told["on a GPU"].startswith("not-tested; it must support sm_80, sm_120: imagefactory verify ")


def test_what_a_build_made_and_where() -> None:
    told = lines()
    assert told["image"] == "pytorch:2.3-cu121 in /store"
    assert (told["digest"], told["manifest"]) == (DIGEST, MANIFEST)
    assert told["size"] == "1.5 GB in 0 layers"
    assert told["built"] == "now (base 1.2s, layers 30.0s)"
    assert lines(fresh=False)["built"].startswith("nothing changed (")
    assert lines(fresh=False, seconds=())["built"] == "nothing changed"


def test_another_base_than_the_published_one_is_said() -> None:
    assert "note" not in lines()
    assert "not the published digest" in lines(published_base=False)["note"]


def test_a_failure_shows_a_line_for_each_fault_and_every_check() -> None:
    faults = "cv2 of opencv-python: no libGL; clip of clip: no pkg_resources"
    checks = (
        CheckResult(name="libraries", state=CheckState.PASSED, detail="all", seconds=1.0, numbers=()),
        CheckResult(name="import", state=CheckState.FAILED, detail=faults, seconds=1.0, numbers=()),
        CheckResult(name="cuda", state=CheckState.NOT_RUN, detail="", seconds=0.0, numbers=()),
    )
    told = report(passed=False, failure=Outcome.LOAD_FAILED, checks=checks)
    text = format_built(
        BuildResult(
            target=make_target(),
            image=IMAGE,
            fresh=True,
            published_base=True,
            report=told,
            seconds=(),
        ),
        "/store",
    )
    lines = [line.strip() for line in text.splitlines()]
    at = lines.index("import  FAILED  cv2 of opencv-python: no libGL")
    assert lines[at + 1 : at + 4] == [
        "clip of clip: no pkg_resources",
        "passed: libraries",
        "not run: cuda",
    ]


def test_a_build_says_which_digest_is_for_what() -> None:
    built = BuildResult(
        target=make_target(), image=IMAGE, fresh=True, published_base=True, report=None, seconds=()
    )
    told = [line.strip() for line in format_built(built, "/store").splitlines()]
    for name, digest in (("digest", DIGEST), ("manifest", MANIFEST), ("config", "sha256:" + "c" * 64)):
        at = next(at for at, line in enumerate(told) if line.split() == [name, digest])
        assert len(told[at + 1].split()) > 5


# --- What a person reads of a push or a copy


OURS, THEIRS = "sha256:" + "a" * 64, "sha256:" + "b" * 64
PLACE = ImageReference(registry="box.example", repository="images/pytorch", tag="2.3-aaaa", digest=OURS)
SENT = TransferResult(
    repository=PLACE.repository,
    candidate=PLACE.tag,
    digest=OURS,
    tags=(("2.3", OURS), ("latest", THEIRS), ("gone", "")),
    bytes_sent=1_500_000,
    sent=2,
    mounted=0,
    present=3,
    seconds=1.25,
)


def test_a_tag_that_another_moved_meanwhile_is_said() -> None:
    pushed = PushResult(target=make_target(), manifest=OURS, reference=PLACE, sent=SENT)
    lines = [line.split(None, 1)[1] for line in format_pushed(pushed).splitlines() if "tag " in line]
    assert lines == [
        "2.3",
        f"latest now points to {THEIRS}: moved by another",
        "gone now points to nothing: moved by another",
    ]


def test_of_a_copy_only_the_tags_that_are_elsewhere_are_told() -> None:
    copied = CopyResult(
        source=replace(PLACE, registry="old.example"), destination=PLACE, before="", sent=SENT
    )
    text = format_copied(copied)
    assert text.count("moved by another") == 2
    assert f"latest now points to {THEIRS}" in text
    assert not any(line.split() == ["tag", "2.3"] for line in text.splitlines())


def test_what_a_push_cost() -> None:
    def cost(**changes: int) -> str:
        pushed = PushResult(
            target=make_target(), manifest=OURS, reference=PLACE, sent=replace(SENT, tags=(), **changes)
        )
        return next(line for line in format_pushed(pushed).splitlines() if line.strip().startswith("sent"))

    assert cost(bytes_sent=0, sent=0).endswith("nothing: all 3 blobs were there (1.2s)")
    assert cost(mounted=4).endswith("1.5 MB: 2 blobs, 4 taken from other repositories, 3 were there (1.2s)")
    assert cost(present=0).endswith("1.5 MB: 2 blobs (1.2s)")
    assert "nothing" not in cost(sent=0, mounted=1)
