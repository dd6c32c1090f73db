"""What a person reads of a push or a copy."""

from __future__ import annotations

from dataclasses import replace

from imagefactory.actions.transfer import CopyResult, PushResult
from imagefactory.oci.store import ImageReference
from imagefactory.oci.transfer import TransferResult
from imagefactory.views.images import format_copied, format_pushed
from tests.made.values import make_target

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
    copied = CopyResult(source=replace(PLACE, registry="old.example"), destination=PLACE, sent=SENT)
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
