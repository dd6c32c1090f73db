"""What an image is shown so that torch sees a GPU in it, and what comes back."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from imagefactory.errors import StatementError, UsageError
from imagefactory.extras.emulate import run
from imagefactory.extras.emulate.inside.roofline import copying, parse_profile, seconds
from imagefactory.extras.emulate.run import (
    EMULATION_DIRECTORIES,
    INSIDE,
    emulating,
    emulation_request,
    read_emulation_summaries,
    recorded_profile,
    write_emulation_summary,
)
from imagefactory.gpu.knowledge import data_sheets, find_data_sheet
from imagefactory.jobs.resources import LONGEST
from imagefactory.model import Mount, RunSpec
from imagefactory.trust.verdict import Verdict, VerdictStatus, VerificationResult
from tests.made.emulated import TOLD as ROW
from tests.made.report import gpu_report
from tests.made.signing import Bench
from tests.made.verdicts import DAY, LAB, NOW, SUBJECT

SHEET, _ = find_data_sheet("T4")
SPEC = RunSpec(
    argv=("python", "train.py"), environment=(("A", "1"),), mounts=(Mount(source=Path("/"), target="/x"),)
)


def test_the_program_is_shown_to_read_and_a_folder_to_write(tmp_path: Path) -> None:
    with emulating(SHEET, 2, SPEC, scratch=tmp_path) as (spec, told):
        own, shown, out = spec.mounts
        assert (own.target, shown.target, out.target) == ("/x", INSIDE, EMULATION_DIRECTORIES)
        assert (shown.writable, out.writable, out.scratch, out.source) == (False, True, True, told)
        assert told.stat().st_mode & 0o777 == 0o777
        names = {path.relative_to(shown.source).as_posix() for path in shown.source.rglob("*")}
        assert {"sitecustomize.py", "asked.json", "imagefactory_emulate/start.py"} <= names
        assert "imagefactory_emulate/sitecustomize.py" not in names
        assert all(path.stat().st_mode & 0o044 == 0o044 for path in shown.source.rglob("*"))
        environment = dict(spec.environment)
        assert environment == {"A": "1", "PYTHONPATH": INSIDE, "IMAGEFACTORY_EMULATE": f"{INSIDE}/asked.json"}
        asked = json.loads((shown.source / "asked.json").read_text())
        assert (asked["folder"], asked["gpus"]) == (EMULATION_DIRECTORIES, 2)
    assert not told.exists()


def test_a_path_of_the_callers_own_stays(tmp_path: Path) -> None:
    own = RunSpec(argv=("a",), environment=(("PYTHONPATH", "/lib"),))
    with emulating(SHEET, 2, own, scratch=tmp_path) as (spec, _):
        assert dict(spec.environment)["PYTHONPATH"] == f"{INSIDE}:/lib"


def test_every_data_sheet_is_a_profile_inside() -> None:
    for sheet in data_sheets():
        profile = parse_profile(json.loads(json.dumps(emulation_request(sheet, 1)["profile"])))
        assert (profile.device, profile.memory, profile.basis) == (sheet.device, sheet.memory, "estimated")
        assert profile.capability == (sheet.capability.major, sheet.capability.minor)
        assert seconds(profile, "product", "fp16", sheet.flops["fp16"], 0.0) == pytest.approx(1.0)
        assert copying(profile, "down-pageable", sheet.link) == pytest.approx(1.0)


def test_each_process_tells_and_the_one_that_did_most_is_kept(tmp_path: Path) -> None:
    (tmp_path / "7.json").write_text(json.dumps(ROW))
    (tmp_path / "9.json").write_text(json.dumps({**ROW, "operations": 5}))
    (tmp_path / "9.part").write_text("{")
    runs = read_emulation_summaries(tmp_path)
    assert [run.operations for run in runs] == [41440, 5]
    write_emulation_summary(tmp_path, runs, tmp_path / "out")
    assert json.loads((tmp_path / "out").read_text()) == ROW


def test_what_an_image_wrote_itself_is_refused(tmp_path: Path) -> None:
    (tmp_path / "7.json").write_text(json.dumps({**ROW, "basis": "verified"}))
    with pytest.raises(StatementError, match=r"7\.json: basis"):
        read_emulation_summaries(tmp_path)


def fill_with_names(folder: Path) -> None:
    for number in range(run.MOST_NAMES + 1):
        (folder / f"{number}.part").touch()


@pytest.mark.parametrize(
    "fill",
    [
        lambda folder: (folder / "7.json").symlink_to(folder / "other"),
        lambda folder: (folder / "7.json").symlink_to("/dev/zero"),
        lambda folder: os.mkfifo(folder / "7.json"),
        lambda folder: (folder / "7.json").mkdir(),
        lambda folder: (folder / "7.json").write_text(" " * (LONGEST + 1)),
        lambda folder: (folder / "7.json").write_text("[" * 100_000),
        lambda folder: (folder / "7.json").write_bytes(b"\xff"),
        fill_with_names,
    ],
)
def test_what_is_not_a_short_regular_file_is_refused_at_once(
    tmp_path: Path, fill: Callable[[Path], None]
) -> None:
    (tmp_path / "other").write_text(json.dumps(ROW))
    fill(tmp_path)
    with pytest.raises(StatementError):
        read_emulation_summaries(tmp_path)
    with pytest.raises(StatementError):
        write_emulation_summary(tmp_path, (), tmp_path / "out")


def test_of_nothing_there_is_no_summary(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        write_emulation_summary(tmp_path, (), tmp_path / "out")
    assert caught.value.code == "gpu-not-used"


def test_what_a_catalog_offers_counts_too(bench: Bench) -> None:
    bench.push(b"a", 22)
    factory = bench.factory
    made = factory.layout.image("one:12.1-cu121")
    assert made is not None
    report = gpu_report(SUBJECT, ("7.5", SHEET.device), 0)
    verdict = Verdict(report=report, issued=NOW, expires=NOW + DAY, keyid=LAB.keyid)
    offered = VerificationResult(digest="sha256:1", standing=VerdictStatus.GOOD, why="", verdict=verdict)
    assert recorded_profile(factory, made, SHEET, NOW) is None
    found = recorded_profile(factory, made, SHEET, NOW, (offered,))
    assert found is not None
    assert found.when == NOW
