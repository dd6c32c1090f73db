"""A job as a value: which values it may have, and the comment at the top of its file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from imagefactory.errors import UsageError
from imagefactory.gpu.capability import parse_capability
from imagefactory.gpu.values import CellClaim, ClaimBasis, Compatibility
from imagefactory.jobs.offer import GpuClass
from imagefactory.jobs.spec import LARGEST_ROWS, ROWS_MOST, header, number_runs, parse_rows, read_rows
from imagefactory.model import Outcome
from imagefactory.schedulers.pool import ImageKind
from imagefactory.schedulers.sizes import GB
from tests.made.errors import fails
from tests.made.offers import digest, failed, gpu_class, job_spec, offer, verdict

SWEEP = {"columns": ("run", "lr")}


def refusal(**changes: Any) -> UsageError:
    with pytest.raises(UsageError) as caught:
        job_spec(**changes)
    assert caught.value.hint
    return caught.value


@pytest.mark.parametrize(
    "address",
    [
        "docker://x/y:tag",
        f"docker://x/y@{digest('a')}\nqueue 1000",
        f"docker://x/$(y)@{digest('a')}",
        "/a/b.simg",
        "/a/b c.sif",
        "|sh x.sif",
        "/a/../b.sif",
        "osdf:///../b.sif",
        "../b.sif",
    ],
)
def test_an_address_that_is_not_pinned_or_says_more(address: str) -> None:
    error = refusal(image=replace(job_spec().image, address=address))
    assert error.code == "submit-value-invalid"
    assert repr(address[:80]) in error.message


@pytest.mark.parametrize("path", ["a b", "a,b", "a;b", "$(x)", "a\nqueue", "~/x", "a*", "", "-x y"])
@pytest.mark.parametrize("field", ["executable", "inputs", "outputs"])
def test_paths_that_say_more(path: str, field: str) -> None:
    error = refusal(**{field: path if field == "executable" else (path,)})
    assert error.code == "submit-value-invalid"


@pytest.mark.parametrize("name", ["a/b", "a b", "../x", "$(x)", "", ".x"])
def test_names_that_leave_the_folder(name: str) -> None:
    assert refusal(name=name).code == "submit-value-invalid"


@pytest.mark.parametrize(
    "word", ["$(lr)", "$HOME", "$$(Memory)", "$ENV(HOME)", "$(Process", "$INT(Process)", "\n", "é"]
)
def test_arguments_in_which_something_else_would_be_filled_in(word: str) -> None:
    assert refusal(arguments=(word,)).code == ("macro-unknown" if "$" in word else "submit-value-invalid")


@pytest.mark.parametrize("name", ["", "a b", "1a", "run", "ClusterId", "process", "é", "a.b"])
def test_columns_that_mean_something_already(name: str) -> None:
    assert refusal(columns=("run", name), rows=(("1",),)).code == "column-name-invalid"


@pytest.mark.parametrize("value", ['a"b', "$(x)", "a\\b", "a\nJOB x y", "a'b", "é", "a\tb", "x" * 1001])
def test_values_that_say_more(value: str) -> None:
    error = refusal(**SWEEP, rows=((value,),))
    assert error.code == "sweep-values-invalid"
    assert "run 1: " in error.message


@pytest.mark.parametrize(
    ("changes", "code", "message"),
    [
        ({"platform": "linux/s390x"}, "platform-unsupported", "linux/s390x"),
        ({"checkpoint": "a, b"}, "submit-value-invalid", "'a, b'"),
        ({"disk": 12 * GB, "kind": ImageKind.DOCKER}, "disk-too-small", "12GB"),
        ({"columns": ("run", "lr", "LR"), "rows": (("1", "2"),)}, "column-name-duplicate", "two columns"),
        ({**SWEEP, "rows": (("1",), ("1", "2"))}, "sweep-values-invalid", "run 2 has 2 values, not 1"),
        ({"columns": ("run",)}, "sweep-size-invalid", "10,000"),
        ({"columns": ("run",), "rows": ((),) * (ROWS_MOST + 1)}, "sweep-size-invalid", "10,000"),
        ({"site": "slurm", "inputs": ("data.csv",)}, "option-conflict", "--input"),
        ({"site": "slurm", "outputs": ("model.pt",)}, "option-conflict", "--output-file"),
        ({"site": "slurm", "disk": GB}, "option-conflict", "--disk"),
        ({"site": "slurm", "gpu_memory": GB}, "option-conflict", "--gpu-memory"),
        ({"site": "slurm", "arguments": ("$(lr)",)}, "macro-unknown", "'$(lr)'"),
        ({"site": "slurm", "arguments": ("a\nb",)}, "argument-not-ascii", r"'a\nb'"),
        ({"site": "kubernetes", "outputs": ("model.pt",)}, "option-conflict", "--output-file"),
        ({"site": "kubernetes", "checkpoint": "last.pt"}, "option-conflict", "--checkpoint"),
        ({"site": "kubernetes", "gather": "gather.py"}, "option-conflict", "--finalize"),
        ({"site": "kubernetes", "arguments": ("$(a-b)",)}, "macro-unknown", "'$(a-b)'"),
        ({"site": "kubernetes", "arguments": ("a\nb",)}, "argument-not-ascii", r"'a\nb'"),
    ],
)
def test_values_that_a_job_cannot_have(changes: dict[str, Any], code: str, message: str) -> None:
    error = refusal(**changes)
    assert error.code == code
    assert message in error.message


def test_the_disk_that_an_image_needs_is_suggested() -> None:
    assert "--disk 13GB" in refusal(disk=12 * GB, kind=ImageKind.DOCKER).hint


# --- the comment at the top


def comment(*capabilities: str, **changes: Any) -> str:
    return "\n".join(header(job_spec(*capabilities, **changes)))


def test_a_prediction_has_a_warning() -> None:
    assert "WARNING" not in comment()
    text = comment(classes=(gpu_class("8.0"), gpu_class("8.6", "12.1", basis=ClaimBasis.PREDICTED)))
    assert "# WARNING: no verdict says that it runs on 8.6; only its code predicts it." in text
    assert "# this very image passed the suite:" not in text
    assert "#   8.6, drivers that take CUDA 12.1 or newer: predicted," in text
    assert "# WARNING: slices of these GPUs (MIG) match too, of which no verdict speaks." in comment(mig=True)


def test_a_reason_of_several_capabilities_is_written_once() -> None:
    def coded(capability: str, faults: tuple[CellClaim, ...] = ()) -> GpuClass:
        row = gpu_class(capability, "12.1", basis=ClaimBasis.PREDICTED)
        reason = f"libtorch_cuda.so has {row.capability.sm} code"
        return replace(row, claim=replace(row.claim, reason=reason), faults=faults)

    fault = CellClaim(
        basis=ClaimBasis.DOCUMENTED,
        answer=Compatibility.PARTLY,
        rule="known-bad:x",
        reason="no Triton",
        source="s",
    )
    classes = (coded("7.0"), coded("7.5", (fault,)), coded("8.0", (fault,)), coded("9.0"))
    excluded = tuple((parse_capability(text), "no code") for text in ("5.0", "5.2", "12.0"))
    text = comment(classes=classes, excluded=excluded)
    least = ", drivers that take CUDA 12.1 or newer: predicted,"
    assert f"#   7.0, 7.5, 8.0, 9.0{least} libtorch_cuda.so has sm_70, sm_75, sm_80, sm_90 code (" in text
    assert "#   known fault on 7.5, 8.0: no Triton\n" in text
    assert "#   not 5.0, 5.2, 12.0: no code\n" in text
    assert f"#   7.0 to 8.0{least}" in comment(classes=(*classes[:3], coded("7.2")))


def test_capabilities_that_failed_are_named() -> None:
    text = comment(offered=offer(verdict("8.0"), failed("7.0", Outcome.NO_KERNEL)))
    assert (
        "\n#   not 7.0: no-kernel: on NVIDIA A100-SXM4-40GB, driver 550.54.15, 2026-11-22: the reason" in text
    )


def test_a_reason_cannot_leave_its_comment() -> None:
    """Reasons and names of GPUs come from untrusted reports; a backslash continues a line."""
    row = gpu_class("8.0")
    row = replace(row, claim=replace(row.claim, reason="fine\nexecutable = /bin/rm", source="x\\"))
    lines = header(job_spec(classes=(row,)))
    assert all(line.startswith("#") and line.isascii() and line.isprintable() for line in lines)
    assert not any(line.endswith("\\") for line in lines)


# --- the runs of a sweep


def test_rows_of_a_file_of_values(tmp_path: Path) -> None:
    path = tmp_path / "values.csv"
    path.write_text("lr, name\n0.1, a b\n\n0.01,c\n")
    assert read_rows(path) == (("run", "lr", "name"), (("0.1", "a b"), ("0.01", "c")))
    assert number_runs(3) == (("run",), ((), (), ()))
    path.write_text("lr\r\n0.1\r\n", encoding="utf-8-sig", newline="")  # as spreadsheets write it
    assert read_rows(path) == (("run", "lr"), (("0.1",),))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "v.csv"),
        ("lr\n", "v.csv"),
        ("lr,seed\n1,2\n3\n", "v.csv:3: 1 values for 2 columns"),
        ('lr\n"1\n', "v.csv:2: "),
    ],
)
def test_files_of_values_that_are_none(text: str, message: str) -> None:
    with fails("sweep-values-invalid", message=message):
        parse_rows(text, "v.csv")


def test_what_cannot_be_a_sweep(tmp_path: Path) -> None:
    (tmp_path / "big").write_bytes(b"lr\n" + b"1\n" * LARGEST_ROWS)
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    for source, code in (
        (0, "sweep-size-invalid"),
        (10001, "sweep-size-invalid"),
        (tmp_path / "none", "cannot-read-file"),
        (tmp_path / "big", "sweep-size-invalid"),
        (tmp_path / "binary", "sweep-values-invalid"),
    ):
        with fails(code):
            number_runs(source) if isinstance(source, int) else read_rows(source)
