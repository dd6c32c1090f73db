"""The file of a layer lock: there and back, and what is said of one that is damaged or wrong."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from imagefactory.lock.layers import (
    LayerLock,
    format_layer_lock,
    parse_layer_lock,
    read_layer_lock,
    write_layer_lock,
    wrong_entries,
)
from tests.made.errors import fails
from tests.made.layer_locks import LAYERS

LOCK = LayerLock(
    target="pytorch-2.3-cu121",
    lock=f"sha256:{'1' * 64}",
    base=f"sha256:{'2' * 64}",
    toolchain="libzstd 1.5.7 level 1, layers 2, installer 1.1.0",
    layers=LAYERS,
)
DIGEST = f"sha256:{'9' * 64}"


def test_a_layer_lock_comes_back_as_it_was_written(tmp_path: Path) -> None:
    write_layer_lock(tmp_path, LOCK)
    assert read_layer_lock(tmp_path, LOCK.target) == LOCK
    assert read_layer_lock(tmp_path, "another") is None
    assert parse_layer_lock(format_layer_lock(LOCK), "f") == LOCK


@pytest.mark.parametrize(
    ("before", "after", "line"),
    [
        ("layer-lock 1", "layer-lock 2", 1),
        ("target: pytorch", "target: Pytorch", 2),
        ("lock: sha256:1", "lock: sha256:x", 3),
        ("\nbase: ", "\nbases: ", 4),
        ("made-with: libzstd", "made-with:  libzstd", 5),
        ("tar\n\n", "tar\n", 7),
        (" debian-12\n", "\n", 8),
        ("bucket 0\n", "bucket 0", 7),
        (f"{LAYERS[1].descriptor.size} environment", "-1 environment", 9),
        ("environment", "environ\x1bment", 9),
        (LAYERS[2].diff_id, "sha256:1", 10),
    ],
)
def test_a_damaged_one_is_told_by_its_line(before: str, after: str, line: int) -> None:
    text = format_layer_lock(LOCK)
    assert text.count(before) == 1
    with fails("lock-malformed") as caught:
        parse_layer_lock(text.replace(before, after), "lockfiles/x")
    assert caught.value.message.startswith(f"lockfiles/x:{line}: ")
    assert "imagefactory lock --layers" in caught.value.hint


def test_a_file_of_another_target_or_of_no_text_is_refused(tmp_path: Path) -> None:
    write_layer_lock(tmp_path, LOCK)
    file = tmp_path / f"{LOCK.target}.layers.txt"
    file.rename(tmp_path / "other.layers.txt")
    with fails("lock-malformed", message=("other.layers.txt:2: ", "pytorch-2.3-cu121")):
        read_layer_lock(tmp_path, "other")
    file.write_bytes(b"\xff")
    with fails("lock-malformed", message=f"{file}:1: "):
        read_layer_lock(tmp_path, LOCK.target)


def test_wrong_entries_are_told_by_file_line_and_layer() -> None:
    made = list(LAYERS)
    assert wrong_entries(LOCK, made, "f") == ()
    made[2] = replace(made[2], diff_id=DIGEST)
    made[3] = replace(made[3], descriptor=replace(made[3].descriptor, digest=DIGEST, size=7))
    assert wrong_entries(LOCK, made, "f") == (
        f"f:10: 'torch 2.3.1' has the diff id {DIGEST}, the file says {LAYERS[2].diff_id}",
        f"f:11: 'bucket 0' has the digest {DIGEST}, the file says {LAYERS[3].descriptor.digest}",
        f"f:11: 'bucket 0' has the size 7, the file says {LAYERS[3].descriptor.size}",
    )


def test_layers_that_one_side_lacks_are_wrong_entries() -> None:
    assert wrong_entries(LOCK, LAYERS[:3], "f") == (
        "f:11: no more layer is made here, the file says 'bucket 0'",
    )
    fewer = replace(LOCK, layers=(LAYERS[0], LAYERS[2]))
    assert wrong_entries(fewer, LAYERS[:2], "f") == (
        "f:9: 'environment' is made here, the file says 'torch 2.3.1'",
    )
