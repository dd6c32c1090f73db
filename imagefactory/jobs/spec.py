"""One job for a batch system: its image, its possible GPUs, and its program. Pure functions.

    JobParameters (from the command line) + an image on offer -> JobSpec, checked once -> a writer

Macros (`$(...)`) are special in job files, and a line end begins another command. So every value must fully
match an allow-list before a JobSpec is created. Source: HTCondor manual, condor_submit(1), "Container
Universe Jobs" and "DAGMan".
"""

from __future__ import annotations

import csv
import io
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from pathlib import Path

from imagefactory.errors import UsageError, os_problem
from imagefactory.gpu.capability import Capability
from imagefactory.jobs.offer import GpuClass, ResourceRequest, is_range
from imagefactory.schedulers.pool import MACHINE_HAS, ImageKind, Inventory, PoolImage
from imagefactory.schedulers.sites import Site
from imagefactory.schedulers.sizes import disk_of, format_size, image_disk, memory_of
from imagefactory.settings.choices import HTCONDOR, SLURM

RUN, ROWS_MOST = "run", 10_000
GATHER = "gather"
"""The node in the DAG of a sweep that runs after all others, and the suffix of its files."""
CHECKPOINTED = 85
"""The exit code of a program that saved a checkpoint and must be started again."""
JOB_MACROS = ("Cluster", "ClusterId", "Process", "ProcId")
MACRO = re.compile(r"\$\(([A-Za-z_][A-Za-z0-9_]*)\)")
ARCHITECTURES = {"linux/amd64": "X86_64", "linux/arm64": "aarch64"}
"""The HTCondor name of the machines for each platform."""

_ADDRESS = re.compile(
    r"(?:docker|oras)://[A-Za-z0-9][A-Za-z0-9./:_-]{0,500}@sha256:[0-9a-f]{64}"
    r"|(?:(?:osdf://)?(?:/(?!\.{1,2}/)[A-Za-z0-9._+-]{1,255}){0,50}/)?[A-Za-z0-9][A-Za-z0-9._+-]{0,255}\.sif"
)
_PATH = re.compile(r"(?:\./|\.\./|/)?(?:[A-Za-z0-9_@=+:.-]+/)*[A-Za-z0-9_@=+:.-]+/?")
_INPUT = re.compile(rf"{_PATH.pattern}|(?:osdf|file|https?|s3|pelican)://[A-Za-z0-9_@=+:./%-]{{1,1000}}")
_PRINTABLE = re.compile(r"[\x20-\x7e]{0,4000}")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,100}")
_COLUMN = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,60}")
LARGEST_ROWS = 1 << 20
_ROWS_HINT = "pass a CSV file of values: --params FILE"
_WIDTH = 100
Rows = tuple[tuple[str, ...], ...]
_VALUE = re.compile(r"[A-Za-z0-9_.,:;/=+@%# -]{0,1000}")


@dataclass(frozen=True, slots=True, kw_only=True)
class JobParameters:
    """The parameters of a job. Sizes are in bytes. For 0 and empty values, imagefactory chooses.

    `kind` is None for the best form of the image. `sif_folder` is the directory of .sif files. `predicted`
    accepts predictions, `faulty` also predictions with a known fault. `own` means that the image is in the
    user's project. `prefix` is the center in the names of targets, if the user joined several.

    `name` is the base name of the files, and `directory` their directory, empty for this one. `executable`
    is transferred unless it is `in_image`. In `arguments`, `$(Process)`, `$(Cluster)` and columns of a sweep
    such as `$(lr)` are replaced. `outputs` are returned, all new files if it is empty. Each GPU has at least
    `gpu_memory` bytes; `mig` accepts MIG slices. With `retry_memory`, a job of HTCondor that exceeded its
    memory starts again with so many bytes more. A job without `gpus` runs on CPUs. A sweep has `columns`,
    the first of which is `run`, and `rows` without the run number. With `checkpoint`, a job that exits with
    CHECKPOINTED is started again. `gather` is a program that runs once after all runs of a sweep.

    `inventory` has the nodes of a Slurm cluster, None if unknown. `files` are the files in a Kubernetes Job.
    """

    target: str
    site: Site
    kind: ImageKind | None = None
    sif_folder: str = ""
    predicted: bool = False
    faulty: bool = False
    own: bool = False
    prefix: str = ""
    name: str = ""
    directory: str = ""
    executable: str = ""
    in_image: bool = False
    arguments: tuple[str, ...] = ()
    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    gpus: int = 1
    cpus: int = 1
    memory: int = 0
    disk: int = 0
    gpu_memory: int = 0
    retry_memory: int = 0
    mig: bool = False
    time: timedelta | None = None
    columns: tuple[str, ...] = ()
    rows: Rows = ()
    checkpoint: str = ""
    gather: str = ""
    inventory: Inventory | None = None
    files: Mapping[str, bytes] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSpec(JobParameters):
    """A job with checked values. Raises UsageError for a value that would have another meaning in the file.

    The job may run on `classes` of GPUs and not on the `excluded` ones. `multi_gpu` are the capabilities on
    which this number of GPUs is verified. `fetch` is the command that downloads the image. `date` is when its
    verdicts were verified.
    """

    platform: str
    image: PoolImage
    classes: tuple[GpuClass, ...]
    excluded: tuple[tuple[Capability, str], ...] = ()
    multi_gpu: tuple[str, ...] = ()
    fetch: str = ""
    date: datetime

    def __post_init__(self) -> None:
        _check_common(self)
        if self.site.batch == HTCONDOR:
            _check_htcondor(self)
        elif self.site.batch == SLURM:
            _check_slurm(self)
        else:
            _check_kubernetes(self)

    @property
    def requested_memory(self) -> int:
        return self.memory or memory_of(self.image.unpacked, self.image.size)

    @property
    def requested_disk(self) -> int:
        return self.disk or disk_of(self.image.kind, *self.transferred)

    @property
    def transferred(self) -> tuple[int, int]:
        """The compressed and unpacked size of the image in bytes; 0 for a file on a shared file system."""
        image = self.image
        return (0, 0) if image.address.startswith("/") else (image.size, image.unpacked)


def resource_request(spec: JobSpec) -> ResourceRequest:
    """Return the requirements for machines and GPUs, without the classes of GPUs."""
    return ResourceRequest(
        gpus=spec.gpus,
        gpu_memory=spec.gpu_memory,
        cpus=spec.cpus,
        memory=spec.requested_memory,
        disk=spec.requested_disk,
        mig=spec.mig,
        platform=spec.platform,
        needs=(MACHINE_HAS[spec.image.kind], *spec.site.attributes(spec.image.address)),
    )


def gather_job(spec: JobSpec) -> JobSpec:
    """Return the job that runs once after all runs of a sweep: one core, no GPU.

    HTCondor transfers the directories of the runs to it. On Slurm, all machines share them.
    """
    runs = range(1, len(spec.rows) + 1) if spec.site.batch == HTCONDOR else ()
    return replace(
        spec,
        name=f"{spec.name}-{GATHER}",
        executable=spec.gather,
        arguments=(),
        inputs=tuple(map(run_directory, runs)),
        outputs=(),
        gpus=0,
        cpus=1,
        gpu_memory=0,
        retry_memory=0,
        mig=False,
        time=None,
        columns=(),
        rows=(),
        checkpoint="",
        gather="",
    )


def run_directory(number: int) -> str:
    """Return the directory of a run in a sweep, which is also the name of its node."""
    return f"run-{number}"


def _check_common(spec: JobSpec) -> None:
    _check(_ADDRESS, spec.image.address, "the address of an image")
    if spec.platform not in ARCHITECTURES:
        raise UsageError(
            "platform-unsupported",
            f"unsupported platform '{spec.platform[:40]}'",
            hint=f"supported platforms: {', '.join(ARCHITECTURES)}",
        )
    _check(_NAME, spec.name, "a name for files")
    _check(_PATH, spec.executable, "the path of a program")
    columns = spec.columns[1:]
    reserved = {RUN, *(name.lower() for name in JOB_MACROS)}
    for name in columns:
        if not _COLUMN.fullmatch(name) or name.lower() in reserved:
            raise UsageError(
                "column-name-invalid",
                f"'{name[:60]}' is not a valid column name",
                hint="use another word, such as lr or seed",
            )
    if len({name.lower() for name in columns}) != len(columns):
        raise UsageError(
            "column-name-duplicate",
            "two columns have the same name",
            hint="rename one; names that differ only in upper and lower case are the same",
        )
    for number, row in enumerate(spec.rows, start=1):
        if len(row) != len(columns):
            raise UsageError(
                "sweep-values-invalid",
                f"run {number} has {len(row)} values, not {len(columns)}",
                hint=f"write one value for each of {', '.join(columns)}",
            )
        for value in row:
            if not _VALUE.fullmatch(value):
                raise UsageError(
                    "sweep-values-invalid",
                    f"run {number}: {value[:80]!r} is not a valid value of a sweep",
                    hint="use only letters, digits, spaces and . , : ; / = + @ % # _ -",
                )


def _check_htcondor(spec: JobSpec) -> None:
    if spec.disk and spec.disk < image_disk(spec.image.kind, *spec.transferred):
        least = format_size(disk_of(spec.image.kind, *spec.transferred, 0))
        raise UsageError(
            "disk-too-small",
            f"the image needs more than the requested {format_size(spec.disk)} of disk",
            hint=f"use --disk {least} or more, or remove it",
        )
    if spec.columns and not 0 < len(spec.rows) <= ROWS_MOST:
        raise UsageError(
            "sweep-size-invalid",
            f"a sweep has 1 to {ROWS_MOST:,} runs, not {len(spec.rows):,}",
            hint="create several sweeps",
        )
    if spec.columns and spec.directory:
        _check(_PATH, spec.directory, "a directory for the files of a sweep")
    for path in spec.inputs:
        _check(_INPUT, path, "the path of a file or an address")
    for path in (*spec.outputs, *filter(None, [spec.checkpoint])):
        _check(_PATH, path, "the path of a file")
    known = {name.lower() for name in (*JOB_MACROS, *spec.columns)}
    for word in spec.arguments:
        _check(_PRINTABLE, word, "an argument that a submit file can carry")
        if "$" in MACRO.sub(lambda macro: "" if macro[1].lower() in known else "$", word):
            raise _unknown_macro(word, (*JOB_MACROS, *spec.columns))


def _check_slurm(spec: JobSpec) -> None:
    for option, value in (("--input", spec.inputs), ("--output-file", spec.outputs), ("--disk", spec.disk)):
        if value:
            raise UsageError(
                "option-conflict",
                f"{option} does not work with Slurm, whose nodes share this directory",
                hint=f"remove {option}",
            )
    if spec.gpus and spec.gpu_memory:
        raise UsageError(
            "option-conflict",
            "--gpu-memory does not work with Slurm, which cannot select GPUs by memory",
            hint="remove --gpu-memory, and write the GPU type into the script: --gres=gpu:TYPE:1",
        )
    _check_shell_arguments(spec, MACRO)


def _check_kubernetes(spec: JobSpec) -> None:
    for option, value in (
        ("--output-file", spec.outputs),
        ("--checkpoint", spec.checkpoint),
        ("--finalize", spec.gather),
    ):
        if value:
            raise UsageError(
                "option-conflict",
                f"{option} does not work on Kubernetes, which does not return files",
                hint=f"remove {option}, and let the program write to a volume that you add to the manifest",
            )
    # Kubernetes itself fills in $(NAME) in a command.
    _check_shell_arguments(spec, MACRO if spec.columns else re.compile(r"\$\(([A-Za-z_])"))


def _check_shell_arguments(spec: JobSpec, macro: re.Pattern[str]) -> None:
    known = {name.lower() for name in spec.columns}
    for word in spec.arguments:
        if any(name.lower() not in known for name in macro.findall(word)):
            raise _unknown_macro(word, spec.columns)
        if not (word.isascii() and word.isprintable()):
            raise UsageError(
                "argument-not-ascii", f"{word[:80]!a} is not a valid argument", hint="use printable ASCII"
            )


def _unknown_macro(word: str, macros: Sequence[str]) -> UsageError:
    known = ", ".join(f"$({name})" for name in macros)
    return UsageError(
        "macro-unknown",
        f"unknown macro in '{word[:80]}'",
        hint=f"use one of {known}, or remove the '$'"
        if known
        else "macros require a sweep: --runs N or --params FILE",
    )


def _check(allowed: re.Pattern[str], value: str, field_name: str) -> None:
    if not allowed.fullmatch(value):
        raise UsageError(
            "submit-value-invalid",
            f"{value[:80]!r} is not {field_name}",
            hint="use only letters, digits and . _ - /, without spaces",
        )


def header(spec: JobSpec) -> list[str]:
    """Return the comment at the top of a job file, which explains the choice of GPUs."""
    image = f"{spec.target}, manifest {spec.image.subject.manifest}"
    origin = f"Made by imagefactory on {spec.date:%Y-%m-%d}."
    if spec.gpus:
        lines = [image, *_gpu_lines(spec, origin)]
    elif spec.classes:
        lines = [image, f"{origin} It asks for no GPU."]
    else:
        lines = [
            image,
            f"{origin} It is only for CPUs and requests no GPU:",
            "there is no verdict about it, only its smoke test.",
        ]
    return [f"# {_comment_line(line)}".rstrip() for line in lines]


def _gpu_lines(spec: JobSpec, origin: str) -> Iterator[str]:
    yield f"{origin} The GPUs below are those, and no others, on which"
    predicted = [gpu_class for gpu_class in spec.classes if not gpu_class.verified]
    yield "it may run:" if predicted else "this very image passed the suite:"
    reasons = ((gpu_class.capability, _reason(gpu_class)) for gpu_class in spec.classes)
    yield from (f"  {capabilities}{reason}" for capabilities, reason in _group_reasons(reasons))
    faults = ((row.capability, str(fault.reason)) for row in spec.classes for fault in row.faults)
    for capabilities, reason in _group_reasons(faults):
        yield f"  known fault on {capabilities}: {reason}"
    yield from (f"  not {capabilities}: {reason}" for capabilities, reason in _group_reasons(spec.excluded))
    if predicted:
        names = ", ".join(str(gpu_class.capability) for gpu_class in predicted)
        yield f"WARNING: no verdict says that it runs on {names}; only its code predicts it."
        yield "Compare the first results with those of another machine."
    if spec.mig:
        yield "WARNING: slices of these GPUs (MIG) match too, of which no verdict speaks."


def _reason(gpu_class: GpuClass) -> str:
    least = f", drivers that take CUDA {gpu_class.cuda} or newer" if gpu_class.cuda else ""
    return f"{least}: {gpu_class.claim.basis}, {gpu_class.claim.reason} ({gpu_class.claim.source})"


def _group_reasons(rows: Iterable[tuple[Capability, str]]) -> Iterator[tuple[str, str]]:
    """Yield each reason once, with its capabilities: `7.0 to 9.0` or `7.0, 8.0`.

    Reasons that differ only in the code (`sm_80`) are merged into one that names all codes.
    """
    groups: dict[str, list[Capability]] = {}
    for capability, text in rows:
        groups.setdefault(text.replace(capability.sm, "sm_*"), []).append(capability)
    for pattern, group in groups.items():
        capabilities = sorted(group)
        title = ", ".join(map(str, capabilities))
        if len(capabilities) > 2 and is_range(capabilities):
            title = f"{capabilities[0]} to {capabilities[-1]}"
        yield title, pattern.replace("sm_*", ", ".join(capability.sm for capability in capabilities))


def _comment_line(text: str) -> str:
    """Return one line of ASCII that cannot end the comment, as a final backslash would."""
    return "".join(char if " " <= char <= "~" and char != "\\" else "?" for char in text)[:500]


# --- the runs of a sweep


def number_runs(count: int | None) -> tuple[tuple[str, ...], Rows]:
    """Return the columns and rows of a sweep without values, nothing for None. Raises UsageError."""
    if count is None:
        return (), ()
    if not 0 < count <= ROWS_MOST:
        raise UsageError(
            "sweep-size-invalid",
            f"a sweep has 1 to {ROWS_MOST:,} runs, not {count:,}",
            hint="create several sweeps",
        )
    return (RUN,), ((),) * count


def read_rows(path: Path) -> tuple[tuple[str, ...], Rows]:
    """Return the columns and rows of a CSV file whose first line has the names of the columns.

    A first column `run` is added, without values in the rows. Raises UsageError that names the line.
    """
    try:
        with path.open("rb") as file:
            data = file.read(LARGEST_ROWS + 1)
        content = data.decode("utf-8-sig")  # spreadsheets write a byte order mark
    except OSError as error:
        raise UsageError(*os_problem("read", path, error), hint=_ROWS_HINT) from error
    except UnicodeDecodeError as error:
        raise UsageError("sweep-values-invalid", f"{path} is not UTF-8 text", hint=_ROWS_HINT) from error
    if len(data) > LARGEST_ROWS:
        raise UsageError(
            "sweep-size-invalid", f"{path} has more than {LARGEST_ROWS:,} bytes", hint="create several sweeps"
        )
    return parse_rows(content, path.name)


def parse_rows(text: str, location: str) -> tuple[tuple[str, ...], Rows]:
    """Return the columns and rows of a CSV text, without empty lines. Raises UsageError."""
    reader = csv.reader(io.StringIO(text), strict=True)
    rows: list[tuple[str, ...]] = []
    try:
        for row in reader:
            cells = tuple(cell.strip() for cell in row)
            if not any(cells):
                continue
            rows.append(cells)
            if len(cells) != len(rows[0]):
                raise UsageError(
                    "sweep-values-invalid",
                    f"{location}:{reader.line_num}: {len(cells)} values for {len(rows[0])} columns",
                    hint=f"write one value for each of {', '.join(rows[0])}",
                )
    except csv.Error as error:
        raise UsageError(
            "sweep-values-invalid", f"{location}:{reader.line_num}: {error}", hint="separate values by commas"
        ) from error
    if len(rows) < 2:
        raise UsageError(
            "sweep-values-invalid",
            f"{location} has no values",
            hint="write column names in the first line (lr,seed), then one line per run",
        )
    return (RUN, *rows[0]), tuple(rows[1:])


def value_arrays(spec: JobSpec) -> Iterator[str]:
    """Yield a shell array with the values of each column.

    Runs count from 1, so the first element is unused.
    """
    for column, name in enumerate(spec.columns[1:]):
        lines = ["   "]
        for row in spec.rows:
            word = shlex.quote(row[column])
            if len(lines[-1]) + len(word) + 1 > _WIDTH and lines[-1].strip():
                lines.append("   ")
            lines[-1] += f" {word}"
        yield "\n".join([f"value_{name}=(none", *lines, ")"])


def format_run_argument(word: str, spec: JobSpec, index: str) -> str:
    """Return an argument in which a shell inserts `$(run)` and columns.

    The variable `index` is the run number.
    """
    names = {name.lower(): name for name in spec.columns}
    parts, start = [], 0
    for macro in MACRO.finditer(word):
        name = names[macro[1].lower()]
        parts.append(shlex.quote(word[start : macro.start()]) if macro.start() > start else "")
        parts.append(f'"${index}"' if name == RUN else f'"${{value_{name}[{index}]}}"')
        start = macro.end()
    rest = word[start:]
    return "".join([*parts, shlex.quote(rest) if rest or not parts else ""])
