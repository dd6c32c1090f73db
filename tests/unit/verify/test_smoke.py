"""The host's side of the smoke test: the real suite runs in a process of its own, in a small real
virtual environment that holds a made-up torch; every kind of failure must be seen as what it is.
"""

from __future__ import annotations

import json
import os
import subprocess
import threading
import venv
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from imagefactory.errors import ToolError
from imagefactory.fs import add_checksum, check_checksum
from imagefactory.model import CheckState, CommandResult, Outcome, Report, RunSpec
from imagefactory.oci.manifests import Image
from imagefactory.progress import QuietProgress
from imagefactory.verify import report, smoke, suite_files
from imagefactory.verify import smoke as smoke_record
from tests.made.documents import part_faults
from tests.made.errors import fails
from tests.made.trial import PLAIN_CHECKS, VERSION, ProcessRunner, ScriptedRunner, make_definition, make_trial

FAKE_TORCH = Path(__file__).parents[2] / "data" / "fake_torch.py"


def make_environment(folder: Path, fault: str = "") -> Path:
    """A virtual environment with the made-up torch, as pip would have installed it."""
    venv.create(folder, symlinks=True)
    site = folder / f"lib/python{VERSION}/site-packages"
    info = site / "torch-1.13.1.dist-info"
    (site / "torch").mkdir()
    text = FAKE_TORCH.read_text().replace('FAULT = ""', f'FAULT = "{fault}"')
    (site / "torch/__init__.py").write_text(text)
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 1.13.1\n")
    (info / "RECORD").write_text(
        f"torch/__init__.py,,{len(text)}\ntorch-1.13.1.dist-info/METADATA,,\ntorch-1.13.1.dist-info/RECORD,,\n"
    )
    return folder


@pytest.fixture(scope="session")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_environment(tmp_path_factory.mktemp("good") / "env")


def full_report(asked: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """The report of an image in which all is well."""
    rows = [
        {
            "name": name,
            "state": "not-applicable" if name == "compiler" else "passed",
            "detail": f"{name} is well",
            "outcome": "",
            "seconds": 0.5,
            "numbers": {"count": 1.0},
        }
        for name in asked["checks"]
    ]
    return {
        "format": 1,
        "nonce": asked["nonce"],
        "target": asked["target"],
        "python": VERSION,
        "running": "",
        "checks": rows,
        **changes,
    }


def scripted(
    change: Callable[[dict[str, Any]], Any] = lambda report: None, **completed: Any
) -> ScriptedRunner:
    def write(path: Path, asked: dict[str, Any]) -> None:
        report = full_report(asked)
        change(report)
        path.write_text(json.dumps(report))

    runner = ScriptedRunner(write=write)
    runner.completed = replace(runner.completed, **completed)
    return runner


def run(trial: report.SmokeTest, runner: Any, records: Path) -> Report:
    with TemporaryDirectory() as folder:
        scratch = Path(folder)
        return smoke.get_smoke_report(trial, records) or smoke.smoke(
            trial, runner, QuietProgress(), records=records, scratch=scratch
        )


def states(report: Report) -> dict[str, str]:
    return {check.name: check.state.value for check in report.checks}


def details(report: Report) -> str:
    return "\n".join(check.detail for check in report.checks)


def test_a_good_image_passes_and_is_not_tried_again(environment: Path, tmp_path: Path) -> None:
    runner = ProcessRunner(environment)
    report = run(make_trial(), runner, tmp_path / "records")
    assert report.passed, details(report)
    assert (report.failure, report.gpu, report.from_record) == (None, Outcome.NOT_TESTED, False)
    assert states(report) == {**dict.fromkeys(PLAIN_CHECKS, "passed"), "compiler": "not-applicable"}
    compute = next(check for check in report.checks if check.name == "compute")
    assert dict(compute.numbers)["gradient-float32-error"] < 1e-5
    assert "torch 1.13.1+cu117" in details(report)
    assert report.suite == suite_files.suite_digest()

    again = run(make_trial("another nonce"), runner, tmp_path / "records")
    assert again == replace(report, from_record=True)
    assert len(runner.seen) == 1


def test_what_the_runner_is_asked_for(environment: Path, tmp_path: Path) -> None:
    runner = ProcessRunner(environment)
    run(make_trial(timeout=33.0), runner, tmp_path)
    (spec,) = runner.seen
    assert spec.argv == (
        "/opt/env/bin/python",
        "-I",
        "-B",
        "/imagefactory/suite/smoke.py",
        "/imagefactory/expect/expectations.json",
        "/imagefactory/report/report.json",
    )
    assert (spec.uid, spec.read_only, spec.network, spec.gpus, spec.timeout) == (0, False, False, False, 33.0)
    assert {mount.target: mount.writable for mount in spec.mounts} == {
        "/imagefactory/suite": False,
        "/imagefactory/expect": False,
        "/imagefactory/report": True,
    }


@pytest.mark.parametrize(
    ("fault", "check", "failure", "words"),
    [
        ("import", "import", Outcome.LOAD_FAILED, "ImportError: libcudart.so.11.0: cannot open"),
        ("version", "import", Outcome.LOAD_FAILED, "says it is 1.13.0+cu117, locked is 1.13.1"),
        ("cuda", "cuda-version", Outcome.LOAD_FAILED, "made for CUDA 11.8, the recipe says 11.7"),
        (
            "cpu",
            "cuda-version",
            Outcome.LOAD_FAILED,
            "was built without CUDA: lock the build for CUDA 11.7",
        ),
        ("matmul", "compute", Outcome.WRONG_NUMBERS, "matmul in float64 is off by"),
        ("nan", "compute", Outcome.WRONG_NUMBERS, "matmul in float64 is off by inf"),
        ("gradient", "compute", Outcome.WRONG_NUMBERS, "gradient in float64 is off by"),
        ("crash", "import", Outcome.LOAD_FAILED, "ended by signal 6"),
        ("exit", "import", Outcome.LOAD_FAILED, "SystemExit(0)"),
        ("leave", "import", Outcome.LOAD_FAILED, "its exit code was 0, its last words were: PASSED"),
    ],
)
def test_each_fault_of_a_framework(
    tmp_path: Path, fault: str, check: str, failure: Outcome, words: str
) -> None:
    runner = ProcessRunner(make_environment(tmp_path / "env", fault))
    report = run(make_trial(), runner, tmp_path / "records")
    assert not report.passed
    assert report.failure is failure
    assert states(report)[check] == "failed"
    assert words in details(report)
    assert not (tmp_path / "records").exists(), "a failure must not be kept"


def test_a_framework_that_hangs(tmp_path: Path) -> None:
    runner = ProcessRunner(make_environment(tmp_path / "env", "hang"), hangs=True)
    report = run(make_trial(), runner, tmp_path / "records")
    assert report.failure is Outcome.TIMEOUT
    assert states(report)["import"] == "failed"
    assert states(report)["packages"] == "passed"
    assert states(report)["compute"] == "not-run"


def damage_metadata(site: Path) -> None:
    (site / "torch-1.13.1.dist-info/METADATA").write_text(
        "Metadata-Version: 2.1\nName: torch\nVersion: 1.13.0\n"
    )


def add_broken_library(site: Path) -> None:
    """An extension that needs a library which is nowhere."""
    gone = site / "libgone.so.1"
    for path, options in ((gone, ["-Wl,-soname,libgone.so.1"]), (site / "torch/ext.so", [str(gone)])):
        command = [
            "gcc",
            "-shared",
            "-fPIC",
            "-Wl,--no-as-needed",
            "-x",
            "c",
            "/dev/null",
            "-x",
            "none",
            *options,
        ]
        subprocess.run([*command, "-o", path], check=True)
    gone.unlink()


@pytest.mark.parametrize(
    ("damage", "check", "words"),
    [
        (damage_metadata, "packages", "torch is 1.13.0, locked is 1.13.1"),
        (add_broken_library, "libraries", "libgone.so.1 is not found (needed by torch/ext.so)"),
        (lambda site: (site / "stray.py").write_text(""), "packages", "belong to no package: stray.py"),
    ],
)
def test_each_fault_of_an_environment(
    tmp_path: Path, damage: Callable[[Path], Any], check: str, words: str
) -> None:
    environment = make_environment(tmp_path / "env")
    damage(environment / f"lib/python{VERSION}/site-packages")
    report = run(make_trial(), ProcessRunner(environment), tmp_path / "records")
    assert report.failure is Outcome.LOAD_FAILED
    assert states(report)[check] == "failed"
    assert words in details(report)


def test_an_image_without_the_package(tmp_path: Path) -> None:
    venv.create(tmp_path / "env", symlinks=True)
    report = run(make_trial(), ProcessRunner(tmp_path / "env"), tmp_path / "records")
    assert report.failure is Outcome.LOAD_FAILED
    assert "torch 1.13.1" in details(report)
    assert "ModuleNotFoundError" in details(report)


def first(report: dict[str, Any]) -> dict[str, Any]:
    return report["checks"][0]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda report: report.update(nonce="old"), "does not contain the nonce"),
        (lambda report: report.update(format=2), "the report: format:"),
        (lambda report: report.update(extra=1), "'extra'"),
        (lambda report: report.pop("python"), "'python'"),
        (lambda report: report["checks"].pop(), "the report has no result of this check"),
        (lambda report: report.update(checks=[]), "the report has no result of this check"),
        (lambda report: report.update(checks="all"), "the report: checks:"),
        (lambda report: report["checks"].append(first(report)), "unexpected check 'packages'"),
        (lambda report: first(report).update(name="sing"), "checks[0].name:"),
        (lambda report: first(report).update(name="unprivileged"), "unexpected check 'unprivileged'"),
        (lambda report: first(report).update(state="good"), "checks[0].state:"),
        (lambda report: first(report).update(state="not-applicable"), "claims not to apply, but it does"),
        (lambda report: first(report).update(outcome="verified"), "checks[0].outcome:"),
        (lambda report: first(report).update(seconds="1"), "checks[0].seconds:"),
        (lambda report: first(report).update(detail=None), "checks[0].detail:"),
        (lambda report: first(report).update(numbers={"x": True}), "checks[0].numbers.x:"),
        (
            lambda report: first(report).update(numbers={"x": 10**400}),
            "checks[0].numbers.x:",
        ),
        (
            lambda report: first(report).update(numbers={"x": float("nan")}),
            "checks[0].numbers.x:",
        ),
        (lambda report: first(report).pop("detail"), "'detail'"),
        (lambda report: report.update(running="import"), "all checks say they passed, but"),
        (lambda report: first(report).update(state="not-run"), "packages is well"),
    ],
)
def test_reports_that_are_not_believed(tmp_path: Path, change: Callable[[Any], Any], words: str) -> None:
    report = run(make_trial(), scripted(change), tmp_path / "records")
    assert not report.passed
    assert report.failure is Outcome.LOAD_FAILED
    assert words in details(report)
    assert tuple(check.name for check in report.checks) == PLAIN_CHECKS
    assert not (tmp_path / "records").exists()


def test_the_script_of_these_tests_passes_unchanged(tmp_path: Path) -> None:
    """Without this the tests above could fail for another reason than theirs."""
    assert run(make_trial(), scripted(), tmp_path).passed


def test_an_image_that_only_prints_passed(tmp_path: Path) -> None:
    report = run(make_trial(), ScriptedRunner(write=lambda path, asked: None), tmp_path)
    assert report.failure is Outcome.LOAD_FAILED
    assert set(states(report).values()) == {"failed"}
    assert "PASSED" in details(report)


@pytest.mark.parametrize(
    "content", [b"", b"PASSED", b"[1]", b"null", b"\xff\xfe", b"[" * 100_000, b"{" + b" " * (2 << 20) + b"}"]
)
def test_junk_instead_of_a_report(tmp_path: Path, content: bytes) -> None:
    report = run(
        make_trial(), ScriptedRunner(write=lambda path, asked: path.write_bytes(content) and None), tmp_path
    )
    assert report.failure is Outcome.LOAD_FAILED


def test_a_report_that_is_a_link_or_a_pipe_is_not_followed(tmp_path: Path) -> None:
    secret = tmp_path / "secret"

    def link(path: Path, asked: dict[str, Any]) -> None:
        secret.write_text(json.dumps(full_report(asked)))
        path.symlink_to(secret)

    for write in (link, lambda path, asked: os.mkfifo(path), lambda path, asked: path.mkdir()):
        report = run(make_trial(), ScriptedRunner(write=write), tmp_path / "records")
        assert report.failure is Outcome.LOAD_FAILED
        assert "the report" in details(report)


def test_a_pass_with_a_bad_exit_code_is_none(tmp_path: Path) -> None:
    report = run(make_trial(), scripted(returncode=139, stderr="Segmentation fault"), tmp_path)
    assert report.failure is Outcome.LOAD_FAILED
    assert "signal 11" in details(report)


def test_a_pass_that_never_ends_is_none(tmp_path: Path) -> None:
    report = run(make_trial(), scripted(timed_out=True, returncode=137), tmp_path)
    assert report.failure is Outcome.TIMEOUT
    assert not report.passed
    assert "all checks say they passed, but it did not end in time" in details(report)


def test_control_characters_of_an_image_reach_nobody(tmp_path: Path) -> None:
    def change(report: dict[str, Any]) -> None:
        first(report).update(detail="\x1b]0;owned\x07\x1b[31mred\nnext" + "y" * 9000, numbers={"\x1b[2J": 1})

    report = run(make_trial(), scripted(change), tmp_path)
    text = "\n".join(smoke.format_table(report)) + str(report.checks[0].numbers)
    assert "\x1b" not in text
    assert "\x07" not in text
    assert len(report.checks[0].detail) < 2100


def test_a_runner_that_cannot_run_is_not_the_images_fault(tmp_path: Path) -> None:
    class Refused(ScriptedRunner):
        def run(self, image: Image, spec: RunSpec) -> CommandResult:
            raise ToolError(
                "test-problem", "user namespaces are denied", hint="sysctl kernel.unprivileged_userns_clone=1"
            )

    report = run(
        make_trial(checks=(*PLAIN_CHECKS, "unprivileged")), Refused(write=lambda path, asked: None), tmp_path
    )
    assert report.failure is Outcome.INFRASTRUCTURE
    assert set(states(report).values()) == {"not-run"}
    assert "user namespaces are denied (sysctl" in details(report)


def test_the_second_run_is_an_ordinary_user_on_a_read_only_root(tmp_path: Path) -> None:
    runner = scripted()
    specs: list[RunSpec] = []
    original = runner.run
    runner.run = lambda image, spec: (specs.append(spec), original(image, spec))[1]  # type: ignore[method-assign]
    report = run(make_trial(checks=(*PLAIN_CHECKS, "unprivileged")), runner, tmp_path)
    assert report.passed
    assert sorted((spec.uid, spec.read_only) for spec in specs) == [(0, False), (65534, True)]
    asked = {row["uid"]: row["checks"] for row in runner.asked}
    assert asked == {None: list(PLAIN_CHECKS), 65534: ["unprivileged", "import", "compute"]}
    assert runner.asked[0]["nonce"] != runner.asked[1]["nonce"]
    assert tuple(check.name for check in report.checks) == (*PLAIN_CHECKS, "unprivileged")
    assert dict(report.checks[-1].numbers)["compute-count"] == 1.0


@pytest.mark.parametrize(
    ("check", "outcome"), [("unprivileged", ""), ("import", "load-failed"), ("compute", "wrong-numbers")]
)
def test_a_fault_of_the_second_run(tmp_path: Path, check: str, outcome: str) -> None:
    def change(report: dict[str, Any]) -> None:
        for row in report["checks"]:
            if "unprivileged" in report["nonce"] and row["name"] == check:
                row.update(state="failed", detail="no home", outcome=outcome)

    report = run(make_trial(checks=(*PLAIN_CHECKS, "unprivileged")), scripted(change, returncode=0), tmp_path)
    assert report.failure is Outcome(outcome or "load-failed")
    assert report.checks[-1].state is CheckState.FAILED
    assert report.checks[-1].detail == f"{check}: no home"


def test_a_fault_of_the_first_run_is_that_of_the_image(tmp_path: Path) -> None:
    def change(report: dict[str, Any]) -> None:
        word = "wrong-numbers" if "unprivileged" in report["nonce"] else "load-failed"
        first(report).update(state="failed", outcome=word)

    report = run(make_trial(checks=(*PLAIN_CHECKS, "unprivileged")), scripted(change), tmp_path)
    assert report.failure is Outcome.LOAD_FAILED
    assert states(report)["unprivileged"] == "failed"


def test_both_runs_are_at_the_same_time(tmp_path: Path) -> None:
    both = threading.Barrier(2, timeout=60)
    runner = scripted(lambda report: both.wait())
    assert run(make_trial(checks=(*PLAIN_CHECKS, "unprivileged")), runner, tmp_path).passed


def test_expectations_hold_lock_and_recipe() -> None:
    assert suite_files.expectations(make_definition(checks=("compute", "packages"))) == {
        "format": 1,
        "target": "pytorch-1.13-cu117",
        "framework": "torch",
        "version": "1.13.1",
        "cuda": "11.7",
        "python": VERSION,
        "packages": {"torch": "1.13.1"},
        "conda": {},
        "named": ["torch"],
        "checks": ["packages", "compute"],
    }


@pytest.mark.parametrize(
    ("changes", "code", "value"),
    [
        ({"framework": "mxnet"}, "check-not-applicable", "'compiler'"),
        ({"checks": ("sing",)}, "check-unknown", "'sing'"),
    ],
)
def test_recipes_the_suite_cannot_serve(changes: dict[str, Any], code: str, value: str) -> None:
    with fails(code) as caught:
        suite_files.expectations(make_definition(**changes))
    assert "recipes/pytorch.yaml:7:5: " in caught.value.message
    assert value in caught.value.message


@pytest.mark.parametrize(
    "other", [make_trial(digest="d"), make_trial(cuda="11.8"), make_trial(checks=("packages",))]
)
def test_a_record_holds_for_one_image_and_one_expectation(tmp_path: Path, other: report.SmokeTest) -> None:
    runner = scripted()
    run(make_trial(), runner, tmp_path)
    assert not run(other, runner, tmp_path).from_record
    assert run(make_trial(), runner, tmp_path).from_record


def test_another_suite_asks_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = scripted()
    run(make_trial(), runner, tmp_path)
    files = {**suite_files.read_suite(), "checks/framework.py": b"# another\n"}
    monkeypatch.setattr(smoke, "read_suite", lambda: files)
    assert not run(make_trial(), runner, tmp_path).from_record


@pytest.mark.parametrize("content", [b"", b"{}", b"[]", b'{"format": 1, "report": 7}', b"\xff"])
def test_a_damaged_record_counts_as_none(tmp_path: Path, content: bytes) -> None:
    runner = scripted()
    run(make_trial(), runner, tmp_path)
    (record,) = tmp_path.glob("*.json")
    record.write_bytes(content)
    assert not run(make_trial(), runner, tmp_path).from_record
    assert run(make_trial(), runner, tmp_path).from_record


def test_a_record_of_a_failure_or_another_image_is_not_taken(tmp_path: Path) -> None:
    runner = scripted()
    run(make_trial(), runner, tmp_path)
    (record,) = tmp_path.glob("*.json")
    good = json.loads(check_checksum(record) or b"")
    assert run(make_trial(), runner, tmp_path).from_record
    for key, value in (("passed", False), ("image", "sha256:" + "9" * 64), ("suite", "x"), ("checks", [])):
        changed = json.dumps({**good, "report": {**good["report"], key: value}})
        record.write_bytes(add_checksum(record, changed.encode()))
        assert not run(make_trial(), runner, tmp_path).from_record


def test_records_that_cannot_be_kept_are_no_failure(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert run(make_trial(), scripted(), tmp_path / "file" / "records").passed


def test_nothing_half_written_stays_among_the_records(tmp_path: Path) -> None:
    run(make_trial(), scripted(), tmp_path)
    assert [path.suffix for path in tmp_path.iterdir()] == [".json"]


def test_the_suites_digest_is_of_names_and_contents() -> None:
    files = {"a.py": b"1", "b.py": b"2"}
    assert suite_files.digest_of(files) == suite_files.digest_of(dict(reversed(files.items())))
    for other in ({"a.py": b"12", "b.py": b""}, {"a.pyb": b"1", ".py": b"2"}, {"a.py": b"1"}):
        assert suite_files.digest_of(other) != suite_files.digest_of(files)
    assert {"smoke.py", "table.py", "frameworks/torch.py", "checks/framework.py"} <= set(
        suite_files.read_suite()
    )


def test_the_suite_is_readable_for_every_user(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        suite_files.write_suite(tmp_path / "suite", suite_files.read_suite())
    finally:
        os.umask(before)
    modes = {path.stat().st_mode & 0o777 for path in (tmp_path / "suite").rglob("*") if path.is_file()}
    assert modes == {0o644}
    assert (tmp_path / "suite/checks").stat().st_mode & 0o777 == 0o755


def test_the_suite_imports_nothing_of_imagefactory() -> None:
    for name, data in suite_files.read_suite().items():
        assert b"from imagefactory" not in data, name
        assert b"import imagefactory" not in data, name


def test_a_report_shown(tmp_path: Path) -> None:
    report = run(make_trial(), scripted(), tmp_path)
    document = json.loads(json.dumps(smoke_record.format_report(report)))
    assert part_faults("imagefactory.build/1", "SmokeReportRow", document) == []
    assert part_faults("imagefactory.build/1", "SmokeReportRow", {**document, "checks": [1]}) != []
    assert (document["passed"], document["failure"], document["gpu"]) == (True, None, "not-tested")
    assert document["checks"][0]["numbers"] == {"count": 1.0}
    lines = smoke.format_table(report)
    assert lines[0].split()[:2] == ["packages", "passed"]
    assert lines[-1] == "CPU-level smoke test: passed; on a GPU: not-tested"
    failed = run(make_trial(), scripted(returncode=1), tmp_path / "other")
    assert (
        smoke.format_table(failed)[-1] == "CPU-level smoke test: failed (load-failed); on a GPU: not-tested"
    )


def test_an_interruption_stops_the_second_run(tmp_path: Path) -> None:
    stopped = threading.Event()

    class Interrupted(ScriptedRunner):
        def run(self, image: Image, spec: RunSpec) -> CommandResult:
            if spec.uid == 0:
                raise KeyboardInterrupt
            assert stopped.wait(60)
            return super().run(image, spec)

        def stop(self) -> None:
            stopped.set()

    with pytest.raises(KeyboardInterrupt):
        run(make_trial(checks=(*PLAIN_CHECKS, "unprivileged")), Interrupted(write=lambda *_: None), tmp_path)
