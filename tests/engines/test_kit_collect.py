"""What a kit brought back is judged as a run on this machine is; nothing in its folder is taken on trust."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from imagefactory.errors import CheckFailedError, NoGpuError, StatementError, UsageError
from imagefactory.model import CheckState, Outcome
from imagefactory.suite.gpu import table
from imagefactory.trust.verdict import missing_evidence
from imagefactory.verify import kits as room
from imagefactory.verify.kits import KitReport, collect_kit
from imagefactory.verify.nonces import LIFETIME, NonceError, NonceStore
from imagefactory.verify.report import EVIDENCE_ACTIONS, EVIDENCE_KIT
from tests.made.errors import fails
from tests.made.kit import (
    NONCE,
    ORDER,
    REFERENCE,
    SUBJECT,
    Bench,
    answer,
    asked,
    docker,
    make_bench,
    open_files,
    suite_report,
)
from tests.services.gpu_host import UUID

RUN_7 = {"GITHUB_REPOSITORY": "lab/images", "GITHUB_RUN_ID": "7", "GITHUB_RUN_ATTEMPT": "1"}
STRANGER = "GPU-99999999-2222-3333-4444-555555555555"


def now() -> datetime:
    return datetime.now(UTC)


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    """A kit that ran, and all held."""
    made = make_bench(tmp_path_factory.mktemp("kit"))
    docker(made, {"report": suite_report()})
    assert made.run() == 0
    return made


@pytest.fixture
def bench(template: Bench, tmp_path: Path) -> Bench:
    """A copy of it."""
    folders = {name: tmp_path / name for name in ("kit", "bin", "nonces")}
    for name, folder in folders.items():
        shutil.copytree(template.kit.parent / name, folder)
    return replace(
        template, kit=folders["kit"], programs=folders["bin"], nonces=NonceStore(folders["nonces"])
    )


def collect(bench: Bench) -> KitReport:
    return collect_kit(bench.kit, bench.nonces, now(), {})


def edit(bench: Bench, name: str, change: Callable[[dict[str, Any]], object]) -> None:
    path = bench.kit / name
    value = json.loads(path.read_bytes())
    change(value)
    path.write_text(json.dumps(value))


def ran(tmp_path: Path, **run: Any) -> Bench:
    bench = make_bench(tmp_path)
    docker(bench, run)
    bench.run()
    return bench


# --- what a run comes to ---------------------------------------------------------------------------


def test_a_run_where_all_held_is_verified_and_says_that_a_kit_saw_it(bench: Bench) -> None:
    found = collect(bench)
    report = found.report
    assert (report.outcome, report.subject, report.nonce) == (Outcome.VERIFIED, SUBJECT, NONCE)
    assert report.runner == "docker"
    assert report.hardware is not None
    assert (report.hardware.kind, report.hardware.driver) == (EVIDENCE_KIT, "550.90.07")
    assert report.device is not None
    assert report.device.uuid == UUID
    assert found.reference == REFERENCE
    assert found.run == bench.issued.run


def test_nothing_is_spent_by_looking(bench: Bench) -> None:
    assert collect(bench) == collect(bench)
    bench.nonces.spend(NONCE, bench.issued.run, result=REFERENCE[-71:], now=now())
    with pytest.raises(NonceError, check=lambda error: error.code == "nonce-replayed"):
        collect(bench)


def test_a_job_of_github_is_told_in_the_evidence(tmp_path: Path) -> None:
    bench = make_bench(tmp_path)
    docker(bench, {"report": suite_report()})
    job = {"GITHUB_ACTIONS": "true", **RUN_7}
    bench.run(**job)
    hardware = collect_kit(bench.kit, bench.nonces, now(), job).report.hardware
    assert hardware is not None
    assert hardware.kind == EVIDENCE_ACTIONS
    assert ("GITHUB_RUN_ID", "7") in hardware.notes


@pytest.mark.parametrize(
    "here",
    [
        {},
        {"GITHUB_ACTIONS": "true"},
        {"GITHUB_ACTIONS": "true", **RUN_7, "GITHUB_RUN_ID": "8"},
        {"GITHUB_ACTIONS": "true", **RUN_7, "GITHUB_RUN_ATTEMPT": "2"},
        {"GITHUB_ACTIONS": "true", **RUN_7, "GITHUB_REPOSITORY": "fork/images"},
        RUN_7,
        {"GITHUB_ACTIONS": "true", **dict.fromkeys(RUN_7, "")},
    ],
)
def test_who_carries_a_kit_cannot_make_a_job_of_it(bench: Bench, here: dict[str, str]) -> None:
    """A kit tells of the job itself, so anybody can: only the same run of GitHub knows better."""
    names = ("GITHUB_REPOSITORY", "GITHUB_RUN_ID", "GITHUB_RUN_ATTEMPT", "GITHUB_JOB", "RUNNER_NAME")
    told = dict.fromkeys(names, "")
    if here.get("GITHUB_RUN_ID") != "":
        told |= RUN_7
    edit(bench, "result/run.json", lambda run: run.update(actions=told))
    hardware = collect_kit(bench.kit, bench.nonces, now(), here).report.hardware
    assert hardware is not None
    assert hardware.kind == EVIDENCE_KIT


def test_a_check_that_failed_there_has_its_word_here(tmp_path: Path) -> None:
    rows = suite_report()["checks"]
    rows[2] = {
        **rows[2],
        "state": table.FAILED,
        "outcome": table.WRONG_NUMBERS,
        "detail": "1 of 1024 is wrong",
    }
    report = collect(ran(tmp_path, report=suite_report(checks=rows), code=1)).report
    assert (report.outcome, report.reason) == (
        Outcome.WRONG_NUMBERS,
        f"{rows[2]['name']}: 1 of 1024 is wrong",
    )


def test_a_check_that_the_recipe_waives_may_be_missing(tmp_path: Path) -> None:
    bench = make_bench(tmp_path, replace(ORDER, waive=("memory-returned",)))
    rows = [row for row in suite_report()["checks"] if row["name"] != "memory-returned"]
    docker(bench, {"report": suite_report(checks=rows)})
    bench.run()
    report = collect(bench).report
    assert (report.outcome, report.waived) == (Outcome.VERIFIED, ("memory-returned",))


@pytest.mark.parametrize(
    ("run", "outcome", "said"),
    [
        ({"says": ["PASSED", "all checks PASSED"]}, Outcome.LOAD_FAILED, "no report"),
        ({"report": suite_report(nonce="0" * 32)}, Outcome.LOAD_FAILED, "nonce"),
        ({"report": suite_report(checks=[])}, Outcome.NOT_TESTED, "did not run"),
        ({"report": suite_report(), "code": 139}, Outcome.LOAD_FAILED, "signal 11"),
        ({"report": suite_report(rehearsal=True)}, Outcome.LOAD_FAILED, "rehearsal"),
        ({"report": suite_report(device=None)}, Outcome.LOAD_FAILED, "names no GPU"),
        (
            {"report": suite_report(device={**suite_report()["device"], "uuid": STRANGER})},
            Outcome.INFRASTRUCTURE,
            "none of this host's",
        ),
        (
            {"report": suite_report(device={**suite_report()["device"], "capability": "9.0"})},
            Outcome.INFRASTRUCTURE,
            "capability 9.0",
        ),
    ],
)
def test_what_does_no_work_is_not_verified(
    tmp_path: Path, run: dict[str, Any], outcome: Outcome, said: str
) -> None:
    report = collect(ran(tmp_path, **run)).report
    assert report.outcome is outcome
    assert said in report.reason


def test_a_hang_is_a_time_out(tmp_path: Path) -> None:
    bench = make_bench(tmp_path, replace(ORDER, timeout=0.3))
    docker(bench, {"sleeps": 600})
    bench.run()
    report = collect(bench).report
    assert report.outcome is Outcome.TIMEOUT
    assert {check.state for check in report.checks} == {CheckState.FAILED}


# --- where nothing was started -----------------------------------------------------------------------


def test_without_a_gpu_there_is_nothing_to_collect_and_the_kit_stays_good(bench: Bench) -> None:
    assert bench.run(places=bench.places._replace(proc="/nowhere")) == 9
    with pytest.raises(NoGpuError, match="no-gpu: no GPU: the NVIDIA driver is not loaded"):
        collect(bench)
    assert bench.run() == 0
    assert collect(bench).report.outcome is Outcome.VERIFIED


def test_another_gpu_a_pull_that_fails_and_a_runner_that_does_not_start(tmp_path: Path) -> None:
    wrong = make_bench(tmp_path / "wrong", asked(capability="9.0"))
    wrong.run()
    with pytest.raises(CheckFailedError, match=r"^wrong-gpu: "):
        collect(wrong)
    unstarted = ran(tmp_path / "unstarted", code=125, complains=["no such device"])
    with pytest.raises(CheckFailedError, match=r"^infrastructure: .*no such device"):
        collect(unstarted)
    unpulled = make_bench(tmp_path / "unpulled")
    docker(unpulled, {})
    answer(unpulled, "docker", {"docker image inspect .*": {"code": 1}, "docker pull .*": {"code": 1}})
    unpulled.run()
    with pytest.raises(CheckFailedError, match=r"^pull-failed: "):
        collect(unpulled)


def test_a_folder_without_a_result_or_without_a_kit(tmp_path: Path) -> None:
    with pytest.raises(UsageError, check=lambda error: error.code == "kit-invalid"):
        collect_kit(tmp_path, NonceStore(tmp_path / "nonces"), now(), {})
    bench = make_bench(tmp_path)
    with pytest.raises(UsageError, match="no result yet"):
        collect(bench)


# --- what was changed on the way -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("kit.json", lambda kit: kit["subject"].update(manifest=f"sha256:{'0' * 64}")),
        ("kit.json", lambda kit: kit.update(waive=list(table.CHECKS))),
        ("kit.json", lambda kit: kit.update(reference=f"other.site/x@sha256:{'0' * 64}")),
        ("kit.json", lambda kit: kit.update(expires="2099-01-01T00:00:00Z")),
        ("expectations.json", lambda asked: asked.update(rehearsal=True)),
        ("expectations.json", lambda asked: asked.update(framework="torch")),
        ("expectations.json", lambda asked: asked.update(nonce="0" * 32)),
    ],
)
def test_what_was_asked_cannot_be_changed(bench: Bench, name: str, change: Callable[[Any], object]) -> None:
    edit(bench, name, change)
    with fails("kit-edited"):
        collect(bench)


def test_the_nonce_of_another_kit_does_not_help(bench: Bench, tmp_path: Path) -> None:
    other = make_bench(tmp_path / "other", asked(nonce="1" * 32))
    for path in (other.kit / "kit.json", other.kit / "expectations.json"):
        (bench.kit / path.name).write_bytes(path.read_bytes())
    with pytest.raises(NonceError, check=lambda error: error.code == "nonce-unknown"):
        collect(bench)
    with pytest.raises(StatementError, match="another kit"):
        collect_kit(bench.kit, other.nonces, now(), {})


def test_what_was_asked_of_a_pool_is_not_answered_by_a_kit(bench: Bench) -> None:
    path = bench.nonces.folder / f"{NONCE}.json"
    path.write_text(path.read_text().replace('"pool": ""', '"pool": "htcondor"'))
    with fails("nonce-other-pool"):
        collect(bench)


def test_a_suite_that_was_changed_is_another_suite(bench: Bench) -> None:
    suite = bench.kit / "suite" / "gpu" / "table.py"
    suite.write_text(suite.read_text() + "\n")
    with pytest.raises(NonceError, check=lambda error: error.code == "nonce-other-suite"):
        collect(bench)


def test_a_suite_that_is_newer_here_is_another_suite(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "suite_digest", lambda: f"sha256:{'0' * 64}")
    with pytest.raises(NonceError, check=lambda error: error.code == "nonce-other-suite"):
        collect(bench)


def test_a_kit_expires(bench: Bench) -> None:
    with pytest.raises(NonceError, check=lambda error: error.code == "nonce-expired"):
        collect_kit(bench.kit, bench.nonces, now() + LIFETIME + timedelta(seconds=1), {})


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("run.json", {"nonce": "1" * 32}),
        ("run.json", {"suite": f"sha256:{'0' * 64}"}),
        ("run.json", {"format": 2}),
        ("run.json", {"outcome": "verified"}),
        ("run.json", {"runner": "unshare"}),
        ("run.json", {"runner": ""}),
        ("run.json", {"returncode": -1}),
        ("run.json", {"returncode": True}),
        ("run.json", {"timed_out": 1}),
        ("run.json", {"seconds": -1.0}),
        ("run.json", {"seconds": float("nan")}),
        ("run.json", {"said": ["\x1b[2J"]}),
        ("run.json", {"said": ["x"] * 100}),
        ("run.json", {"started": "yesterday"}),
        ("run.json", {"actions": {"GITHUB_RUN_ID": "7"}}),
        ("run.json", {"more": 1}),
        ("evidence.json", {"driver": "550; rm"}),
        ("evidence.json", {"gpus": []}),
        ("evidence.json", {"gpus": [{"name": "A", "capability": "8.0", "uuid": UUID, "memory": -1}]}),
        ("evidence.json", {"known": [1]}),
        ("evidence.json", {"nodes": ["/dev/sda"]}),
        ("evidence.json", {"notes": []}),
        ("evidence.json", {"format": True}),
    ],
)
def test_a_result_that_no_kit_writes_is_never_verified(
    bench: Bench, name: str, change: dict[str, Any]
) -> None:
    edit(bench, f"result/{name}", lambda row: row.update(change))
    with contextlib.suppress(StatementError):
        assert missing_evidence(collect(bench).report)


def test_a_result_without_evidence_is_refused(bench: Bench) -> None:
    (bench.kit / "result" / "evidence.json").unlink()
    with pytest.raises(StatementError, match="evidence"):
        collect(bench)


@pytest.mark.parametrize("name", ["kit.json", "result/run.json", "result/report.json", "suite/table.py"])
@pytest.mark.parametrize("kind", ["link", "pipe", "large", "folder"])
def test_only_plain_files_are_read(bench: Bench, tmp_path: Path, name: str, kind: str) -> None:
    path = bench.kit / name
    data = path.read_bytes()
    path.unlink()
    if kind == "link":
        (tmp_path / "elsewhere").write_bytes(data)
        path.symlink_to(tmp_path / "elsewhere")
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.write_bytes(data + b" " * (1 << 20))
    opened = open_files()
    with pytest.raises(UsageError):
        collect(bench)
    assert open_files() <= opened


@pytest.mark.parametrize("name", [b"gpu/\xff.py", "gpu/\u202e.py".encode()])
def test_a_suite_with_a_strange_name_is_another_suite(bench: Bench, name: bytes) -> None:
    (bench.kit / "suite" / os.fsdecode(name)).touch()
    with pytest.raises(NonceError, check=lambda error: error.code == "nonce-other-suite"):
        collect(bench)
    assert bench.run() == 2


def test_a_suite_that_is_a_link_is_not_walked(bench: Bench, tmp_path: Path) -> None:
    """The very suite lies behind it, so its digest would be right."""
    (bench.kit / "suite").rename(tmp_path / "elsewhere")
    (bench.kit / "suite").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(NonceError, check=lambda error: error.code == "nonce-other-suite"):
        collect(bench)


@pytest.mark.parametrize("data", [b"", b"[]", b"{" * 100000, b'{"nonce": 1}', b"\xff\xfe"])
def test_files_that_are_no_json(bench: Bench, data: bytes) -> None:
    (bench.kit / "result" / "run.json").write_bytes(data)
    with pytest.raises(StatementError):
        collect(bench)
    (bench.kit / "kit.json").write_bytes(data)
    with pytest.raises((UsageError, NonceError)):
        collect(bench)
