"""What comes back from elsewhere: kits, sweeps, a pool's word on its machines."""

from __future__ import annotations

import tempfile
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from imagefactory.errors import ImagefactoryError, UsageError
from imagefactory.model import Outcome
from imagefactory.schedulers.htcondor.ads import parse_ads, parse_status
from imagefactory.schedulers.pool import ImageKind, NodeResult, PoolImage, SkippedCell, SweepNode, SweepSpec
from imagefactory.schedulers.sweep_file import (
    CollectedNode,
    read_collected,
    read_scheduler,
    read_sweep,
    write_collected,
    write_sweep_file,
)
from imagefactory.verify.kits import collect_kit
from tests.made.ads import A100, H100, MIG_SLICE, gpu, slot, status
from tests.made.kit import NONCE, SUBJECT, Bench, docker, make_bench, suite_report
from tests.made.mutants import changed_bytes, changed_text

NOW = datetime(2026, 11, 22, tzinfo=UTC)
ADS = status(slot("a.example.org", [gpu("GPU-11111111", A100), gpu("GPU-22222222", H100)]),
             slot("b.example.org", [gpu("GPU-33333333", MIG_SLICE)], used=("GPU-33333333",)))  # fmt: skip


@pytest.fixture(scope="module")
def brought_back(tmp_path_factory: pytest.TempPathFactory) -> tuple[Bench, dict[Path, bytes]]:
    """A kit that ran well, and its files."""
    bench = make_bench(tmp_path_factory.mktemp("kit"))
    docker(bench, {"report": suite_report()})
    bench.run()
    files = [path for path in bench.kit.rglob("*.json*") if path.is_file()]
    assert collect_kit(bench.kit, bench.nonces, datetime.now(UTC), {}).report.outcome is Outcome.VERIFIED
    return bench, {path: path.read_bytes() for path in files}


@given(st.data())
def test_a_kit_that_was_changed_speaks_of_its_own_image_and_nonce(
    brought_back: tuple[Bench, dict[Path, bytes]], data: st.DataObject
) -> None:
    bench, files = brought_back
    path = data.draw(st.sampled_from(sorted(files)))
    whole = files[path]
    text = changed_text(whole.decode()).map(lambda text: text.encode("utf-8", "replace"))
    try:
        path.write_bytes(data.draw(changed_bytes(whole) | text))
        with suppress(ImagefactoryError):
            report = collect_kit(bench.kit, bench.nonces, datetime.now(UTC), {}).report
            assert (report.subject, report.nonce) == (SUBJECT, NONCE)
    finally:
        path.write_bytes(whole)


@given(changed_text(ADS))
def test_a_pools_machines_are_read_or_refused(text: str) -> None:
    with suppress(ImagefactoryError):
        parse_ads(parse_status(text), NOW)


def make_sweep(folder: Path) -> None:
    image = PoolImage(kind=ImageKind.SIF, address="/images/one.sif", subject=SUBJECT, size=1, unpacked=1)
    node = SweepNode(
        name="one-sm90", target="one", capability="9.0", image=image, nonce="0" * 32,
        cuda="", memory=1, disk=1, timeout=60, python="/usr/bin/python3",
    )  # fmt: skip
    left = SkippedCell(target="one", capability="12.0", rule="no-match", reason="no GPU of the pool has it")
    sweep = SweepSpec(
        id=folder.name, created=NOW, level="full", site="generic", nodes=(node,), skipped=(left,)
    )
    write_sweep_file(folder, sweep)
    result = NodeResult(node=node.name, outcome=Outcome.HELD, reason="held: 34")
    write_collected(folder, [CollectedNode(result=result, target="one", capability="9.0", nonce=node.nonce)])


@given(st.data())
def test_a_sweep_folder_is_read_or_refused(data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory(prefix="attack-") as place:
        folder = Path(place)
        make_sweep(folder)
        for path in sorted(folder.iterdir()):
            whole = path.read_bytes()
            text = changed_text(whole.decode()).map(lambda text: text.encode("utf-8", "replace"))
            path.write_bytes(data.draw(changed_bytes(whole) | text))
        for read in (read_sweep, read_collected):
            with suppress(UsageError):
                read(folder)
        assert isinstance(read_scheduler(folder), str)
