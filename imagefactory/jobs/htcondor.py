"""A researcher's submit file, and the DAG of a sweep of runs: text made of checked values. Pure.

    Offer -> Form (image and what is proven of it) + Run + Site -> format_submit() -> FILE.sub
                                                    Sweep rows  -> format_runs()   -> FILE.dag

Every value passes an allow-list by full match before it stands in a line: a submit file is full of macros
(`$(...)`), and a line's end begins another command. Source: HTCondor's manual, condor_submit(1), "Container
Universe Jobs" and "DAGMan".
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from imagefactory.errors import UsageError
from imagefactory.gpu.capability import Capability
from imagefactory.gpu.knowledge.tables import numbers
from imagefactory.jobs.offer import GpuClass, ImageForm, all_capabilities
from imagefactory.schedulers.htcondor.ads import WHOLE_GPU_EXPRESSION
from imagefactory.schedulers.pool import PoolImage
from imagefactory.schedulers.sites import Site
from imagefactory.schedulers.sizes import MB, disk_of, format_size, image_disk, memory_of

# --- Classes of GPUs as lines of a submit file: they match these classes and no others. Pure
#     one range, one driver    gpus_minimum_capability, gpus_maximum_capability, gpus_minimum_runtime
#     all else                 require_gpus = member(Capability, {7.0, 8.0}) && DriverVersion >= 12.4
#     and in both              require_gpus without slices of GPUs (MIG), a class of their own
# What `require_gpus` names cancels the bounds of `gpus_*` without a word (condor_submit's manual), so what
# one
# form compares the other does not name. `gpus_minimum_runtime` is compared with `MaxSupportedVersion`
# (12040)
# and `DriverVersion` is a float (12.4): both are the newest CUDA that the driver takes.


def format_gpu_request(
    classes: Sequence[GpuClass], memory: int = 0, *, slices: bool = False
) -> tuple[str, ...]:
    """The lines that match GPUs of these classes, with `memory` bytes of their own at least.

    `classes` is not empty and has no capability twice. With `slices` those of such GPUs match too.
    """
    chosen = sorted(classes, key=lambda gpu_class: gpu_class.capability)
    cudas = sorted({gpu_class.cuda for gpu_class in chosen}, key=lambda cuda: numbers(cuda or "0"))
    capabilities = [gpu_class.capability for gpu_class in chosen]
    if len(cudas) == 1 and is_range(capabilities):
        lines = [
            f"gpus_minimum_capability = {capabilities[0]}",
            f"gpus_maximum_capability = {capabilities[-1]}",
        ]
        lines += [f"gpus_minimum_runtime = {cudas[0]}"] if cudas[0] else []
        lines += [f"gpus_minimum_memory = {format_size(memory)}"] if memory else []
        lines += [] if slices else [f"require_gpus = {WHOLE_GPU_EXPRESSION}"]
        return tuple(lines)
    groups = [_group([gpu_class for gpu_class in chosen if gpu_class.cuda == cuda], cuda) for cuda in cudas]
    expression = groups[0] if len(groups) == 1 else " || ".join(f"({group})" for group in groups)
    more = [f"GlobalMemoryMb >= {-(-memory // MB)}"] if memory else []
    more += [] if slices else [WHOLE_GPU_EXPRESSION]
    both = f"({expression})" if more and len(groups) > 1 else expression
    return (f"require_gpus = {' && '.join([both, *more])}",)


def is_range(capabilities: Sequence[Capability]) -> bool:
    """Whether no other capability lies between the lowest and the highest.

    Of those that are newer than this program nobody knows what lies between them.
    """
    asked, known = set(capabilities), set(all_capabilities())
    between = {one for one in known if min(asked) <= one <= max(asked)}
    return len(asked) == 1 or between == asked


def _group(classes: Sequence[GpuClass], cuda: str) -> str:
    """An expression without `||`, so that it can be joined with others by `&&`."""
    listed = ", ".join(str(one.capability) for one in classes)
    which = f"Capability == {listed}" if len(classes) == 1 else f"member(Capability, {{{listed}}})"
    return f"{which} && DriverVersion >= {cuda}" if cuda else which


RUN, ROWS_MOST = "run", 10_000
CHECKPOINTED = 85
"""The exit code by which a program says that it saved its checkpoint, and wants to be started again."""
GATHER = "gather"
"""The node of a sweep's DAG that waits for all others, and what its files are called after."""
ARCHITECTURES = {"linux/amd64": "X86_64", "linux/arm64": "aarch64"}
"""As HTCondor calls the machines on which images of a platform run."""

_ADDRESS = re.compile(
    r"(?:docker|oras)://[A-Za-z0-9][A-Za-z0-9./:_-]{0,500}@sha256:[0-9a-f]{64}"
    r"|(?:(?:osdf://)?(?:/(?!\.{1,2}/)[A-Za-z0-9._+-]{1,255}){0,50}/)?[A-Za-z0-9][A-Za-z0-9._+-]{0,255}\.sif"
)
_PATH = re.compile(r"(?:\./|\.\./|/)?(?:[A-Za-z0-9_@=+:.-]+/)*[A-Za-z0-9_@=+:.-]+/?")
_URL = re.compile(r"(?:osdf|file|https?|s3|pelican)://[A-Za-z0-9_@=+:./%-]{1,1000}")
_PRINTABLE = re.compile(r"[\x20-\x7e]{0,4000}")
_MACRO = re.compile(r"\$\(([A-Za-z_][A-Za-z0-9_]*)\)")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,100}")
_COLUMN = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,60}")
_VALUE = re.compile(r"[A-Za-z0-9_.,:;/=+@%# -]{0,1000}")
_JOB_MACROS = ("Cluster", "ClusterId", "Process", "ProcId")
_VALUE_OF = "value_"
"""What the macro of a column begins with: a macro called `rank` or `input` would be that command of the job,
and no command begins so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SubmitCommand:
    """What a person wants to run in the image.

    `name` names the files. `executable` is transferred unless it is `in_image`. `arguments` are words, in
    which `$(Process)`, `$(Cluster)` and columns of a sweep, `$(lr)`, are filled in. `inputs` are files and
    addresses, `outputs` files that come back (all new ones where none is named). Sizes are bytes, 0 for what
    the rules of sizes.py give; `gpu_memory` is what each GPU must have. With `mig` slices of GPUs do too.
    A job of no `pool` runs on CPUs alone. `columns` are of a sweep, the first is `run`; empty for one job.
    `checkpoint` is what a job that leaves with CHECKPOINTED has saved, and is started again with. `gather` is
    the program that runs once when all runs of a sweep are done.
    """

    name: str
    executable: str
    in_image: bool = False
    arguments: tuple[str, ...] = ()
    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    gpus: int = 1
    cpus: int = 1
    memory: int = 0
    disk: int = 0
    gpu_memory: int = 0
    mig: bool = False
    time: timedelta | None = None
    columns: tuple[str, ...] = ()
    checkpoint: str = ""
    gather: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobImageSpec:
    """The image a job runs in: `target` and `platform` are its own, `classes` the GPUs it may run on."""

    target: str
    platform: str
    form: ImageForm
    classes: tuple[GpuClass, ...]
    judged: datetime


def format_submit(taken: JobImageSpec, run: SubmitCommand, site: Site) -> str:
    """The text of a submit file. Raises UsageError for a value that cannot stand there."""
    image = taken.form.image
    address = checked_address(image.address)
    size, unpacked = _sizes(image)
    if run.disk and run.disk < image_disk(image.kind, size, unpacked):
        least = format_size(disk_of(image.kind, size, unpacked, 0))
        raise UsageError(
            "disk-too-small",
            f"the image needs more than the requested {format_size(run.disk)} of disk",
            hint=f"use --disk {least} or more, or remove it",
        )
    gpus = [f"request_gpus = {run.gpus}"] if run.gpus else []
    if run.gpus:
        gpus += format_gpu_request(taken.classes, run.gpu_memory, slices=run.mig)
    needs = [f'(Arch == "{_architecture(taken.platform)}")', *site.requirements(address)]
    memory, disk = requested_resources(image, run)
    groups = [
        comments(taken, run),
        _image(address, run),
        _what_runs(run),
        [*gpus, f"requirements = {' && '.join(needs)}"],
        [
            f"request_cpus = {run.cpus}",
            f"request_memory = {format_size(memory)}",
            f"request_disk = {format_size(disk)}",
        ],
        [
            *site.lines(run.time, gpus=bool(run.gpus), resumes=bool(run.checkpoint)),
            *(f"# {line}" for line in site.told(gpus=bool(run.gpus), resumes=bool(run.checkpoint))),
        ],
        _logs(run),
        ["queue"],
    ]
    return "\n\n".join("\n".join(group) for group in groups if group) + "\n"


def requested_resources(image: PoolImage, run: SubmitCommand) -> tuple[int, int]:
    """The memory and the disk that a job asks for, in bytes: what the person says, else by the image."""
    memory = run.memory or memory_of(image.unpacked, image.size)
    return memory, run.disk or disk_of(image.kind, *_sizes(image))


def _sizes(image: PoolImage) -> tuple[int, int]:
    """Packed and unpacked; nothing for a file at a path that the pool's machines share."""
    return (0, 0) if image.address.startswith("/") else (image.size, image.unpacked)


def format_runs(
    submit_file: str, columns: Sequence[str], rows: Sequence[Sequence[str]], last: str = ""
) -> str:
    """The DAG of a sweep: a node for each row, with its values. `columns` are without `run`, which counts.

    `last` is the submit file of a node that waits for all of them.

    Raises UsageError for a name or a value that could mean something else there, naming the row.
    """
    _checked(_NAME, submit_file, "the name of a submit file")
    check_columns(columns)
    if not 0 < len(rows) <= ROWS_MOST:
        raise UsageError(
            "sweep-size-invalid",
            f"a sweep has 1 to {ROWS_MOST:,} runs, not {len(rows):,}",
            hint="create several sweeps",
        )
    lines = [f"JOB {GATHER} {_checked(_NAME, last, 'the name of a submit file')}"] if last else []
    for number, row in enumerate(rows, start=1):
        if len(row) != len(columns):
            raise UsageError(
                "sweep-values-invalid",
                f"run {number} has {len(row)} values, not {len(columns)}",
                hint=f"write one value for each of {', '.join(columns)}",
            )
        values = [(RUN, str(number)), *zip(map(_macro_of, columns), row, strict=True)]
        said = " ".join(f'{key}="{checked_value(value, number)}"' for key, value in values)
        lines += [f"JOB {run_directory(number)} {submit_file}", f"VARS {run_directory(number)} {said}"]
        lines += [f"PARENT {run_directory(number)} CHILD {GATHER}"] if last else []
    return "\n".join(lines) + "\n"


def run_directory(number: int) -> str:
    """The folder of a run of a sweep, which is its node's name too."""
    return f"run-{number}"


def check_columns(columns: Sequence[str]) -> None:
    """Raises UsageError for names that cannot be part of a macro's, or mean something else in arguments."""
    taken = {RUN, *(name.lower() for name in _JOB_MACROS)}
    for name in columns:
        if not _COLUMN.fullmatch(name) or name.lower() in taken:
            raise UsageError(
                "column-name-invalid",
                f"'{name[:60]}' cannot be a column name",
                hint="use another word, such as lr or seed",
            )
    if len({name.lower() for name in columns}) != len(columns):
        raise UsageError(
            "column-name-duplicate",
            "two columns have the same name",
            hint="rename one; upper and lower case are the same",
        )


def format_arguments(words: Sequence[str], columns: Sequence[str] = ()) -> str:
    """Words as `arguments` takes them, in HTCondor's new syntax: a value in double quotes.

    Inside, single quotes keep a word together and a quote of either kind is written twice. Raises UsageError
    for what is no printable ASCII, and for a `$` that is no macro of the job or the sweep.
    """
    return '"' + " ".join(_argument(word, (*_JOB_MACROS, *columns)) for word in words) + '"'


def _macro_of(column: str) -> str:
    return f"{_VALUE_OF}{column}"


def _argument(word: str, macros: Sequence[str]) -> str:
    _checked(_PRINTABLE, word, "an argument that a submit file can carry")
    named = _MACRO.findall(word)
    own = {name.lower(): name if name in (RUN, *_JOB_MACROS) else _macro_of(name) for name in macros}
    unknown = next((name for name in named if name.lower() not in own), None)
    if unknown is not None or "$" in _MACRO.sub("", word):
        known = ", ".join(f"$({name})" for name in macros)
        raise UsageError(
            "macro-unknown",
            f"condor_submit would expand the '$' in '{word[:80]}'",
            hint=f"use one of {known}, or remove the '$'",
        )
    filled = _MACRO.sub(lambda name: f"$({own[name[1].lower()]})", word)
    quoted = filled.replace('"', '""').replace("'", "''")
    return f"'{quoted}'" if not word or named or re.search(r"[\s']", word) else quoted


def _image(address: str, run: SubmitCommand) -> list[str]:
    """A file at a path is one that the pool's machines share: it is not sent with each job."""
    lines = ["universe = container", f"container_image = {_from_run(address, run)}"]
    return [*lines, "transfer_container = false"] if address.startswith("/") else lines


def _what_runs(run: SubmitCommand) -> list[str]:
    """Paths are from the folder of the submit file; a run of a sweep stands one folder lower."""
    lines = [f"executable = {checked_path(run.executable)}"]
    lines += ["transfer_executable = false"] if run.in_image else []
    if run.arguments:
        lines.append(f"arguments = {format_arguments(run.arguments, run.columns)}")
    lines += [f"initialdir = run-$({RUN})"] if run.columns else []
    if run.inputs:
        lines.append(f"transfer_input_files = {', '.join(_input(path, run) for path in run.inputs)}")
    if run.outputs:
        names = (_checked(_PATH, path, "the path of a file") for path in run.outputs)
        lines.append(f"transfer_output_files = {', '.join(names)}")
    lines += ["should_transfer_files = YES", "when_to_transfer_output = ON_EXIT"]
    if run.checkpoint:
        kept = _checked(_PATH, run.checkpoint, "the path of a file")
        lines += [f"checkpoint_exit_code = {CHECKPOINTED}", f"transfer_checkpoint_files = {kept}"]
    return lines


def _input(path: str, run: SubmitCommand) -> str:
    if _URL.fullmatch(path):
        return path
    return _from_run(_checked(_PATH, path, "the path of a file or an address"), run)


def _from_run(path: str, run: SubmitCommand) -> str:
    """A path or address as seen from where the job begins."""
    here = "/" not in path[:1] and "://" not in path
    return f"../{path.removeprefix('./')}" if run.columns and here else path


def _logs(run: SubmitCommand) -> list[str]:
    name = checked_name(run.name)
    of = "job" if run.columns else f"{name}_$(Cluster)_$(Process)"
    lines = [f"log = {of}.log", f"output = {of}.out", f"error = {of}.err"]
    told = "ulog_execute_attrs = GPUs_DeviceName, GPUs_Capability, GPUs_DriverVersion"
    return [*lines, told] if run.gpus else lines


# --- comments --------------------------------------------------------------------------------------


def comments(taken: JobImageSpec, run: SubmitCommand) -> list[str]:
    """What the file rests on, for the person who reads it later."""
    image = taken.form.image
    name, made = f"{taken.target}, manifest {image.subject.manifest}", f"{taken.judged:%Y-%m-%d}"
    if not run.gpus and taken.classes:
        return [
            f"# {_comment_line(line)}"
            for line in (name, f"Made by imagefactory on {made}. It asks for no GPU.")
        ]
    if not run.gpus:
        cpus = f"Made by imagefactory on {made}. It is for CPUs alone and asks for no GPU:"
        smoke = "no verdict speaks of it, and its smoke test is all that was tried."
        return [f"# {_comment_line(line)}" for line in (name, cpus, smoke)]
    lines = [
        name,
        f"Made by imagefactory on {made}. The GPUs below are those, and no others, on which",
        "this very image passed the suite:"
        if all(gpu_class.proven for gpu_class in taken.classes)
        else "it may run:",
    ]
    for capabilities, said in _group_reasons(
        (gpu_class.capability, _gpu_comment(gpu_class)) for gpu_class in taken.classes
    ):
        lines.append(f"  {capabilities}{said}")
    for capabilities, said in _group_reasons(
        (gpu_class.capability, str(fault.reason)) for gpu_class in taken.classes for fault in gpu_class.faults
    ):
        lines.append(f"  known fault on {capabilities}: {said}")
    lines += [
        f"  not {capabilities}: {why}" for capabilities, why in _group_reasons(taken.form.grounds.refused)
    ]
    guessed = [str(gpu_class.capability) for gpu_class in taken.classes if not gpu_class.proven]
    if guessed:
        lines += [
            f"WARNING: no verdict says that it runs on {', '.join(guessed)}; its code alone predicts so.",
            "Compare the first results with those of another machine.",
        ]
    if run.mig:
        lines.append("WARNING: slices of these GPUs (MIG) match too, of which no verdict speaks.")
    return [f"# {_comment_line(line)}".rstrip() for line in lines]


def _gpu_comment(gpu_class: GpuClass) -> str:
    least = f", drivers that take CUDA {gpu_class.cuda} or newer" if gpu_class.cuda else ""
    return f"{least}: {gpu_class.claim.basis}, {gpu_class.claim.reason} ({gpu_class.claim.source})"


def _group_reasons(rows: Iterable[tuple[Capability, str]]) -> Iterator[tuple[str, str]]:
    """What is said of several capabilities in the same words once: `7.0 to 9.0`, or `7.0, 8.0`.

    The words are the same where they differ by the capability's own code (`sm_80`) alone; all are named then.
    """
    alike: dict[str, list[tuple[Capability, str]]] = {}
    for capability, text in rows:
        alike.setdefault(text.replace(capability.sm, "sm_*"), []).append((capability, text))
    for pattern, same in alike.items():
        capabilities = sorted(capability for capability, _ in same)
        title = ", ".join(map(str, capabilities))
        if len(capabilities) > 2 and is_range(capabilities):
            title = f"{capabilities[0]} to {capabilities[-1]}"
        yield title, pattern.replace("sm_*", ", ".join(one.sm for one in capabilities))


def _comment_line(text: str) -> str:
    """One line of ASCII that ends no comment: a backslash at its end would."""
    return "".join(char if " " <= char <= "~" and char != "\\" else "?" for char in text)[:500]


# --- values ----------------------------------------------------------------------------------------


def checked_address(address: str) -> str:
    """The address of an image, pinned. Raises UsageError for another."""
    return _checked(_ADDRESS, address, "the address of an image")


def checked_name(name: str) -> str:
    """Raises UsageError for what names no file of a job."""
    return _checked(_NAME, name, "a name for files")


def checked_path(path: str) -> str:
    """Raises UsageError for what could mean something else in a submit file or a shell."""
    return _checked(_PATH, path, "the path of a program")


def _checked(allowed: re.Pattern[str], value: str, what: str) -> str:
    if not allowed.fullmatch(value):
        raise UsageError(
            "submit-value-invalid",
            f"{value[:80]!r} is not {what}",
            hint="use only letters, digits and . _ - /, without spaces",
        )
    return value


def checked_value(value: str, number: int) -> str:
    if not _VALUE.fullmatch(value):
        raise UsageError(
            "sweep-values-invalid",
            f"run {number}: {value[:80]!r} cannot be a value of a sweep",
            hint="use only letters, digits, spaces and . , : ; / = + @ % # _ -",
        )
    return value


def _architecture(platform: str) -> str:
    architecture = ARCHITECTURES.get(platform)
    if architecture is None:
        raise UsageError(
            "platform-unsupported",
            f"unsupported platform '{platform[:40]}'",
            hint=f"supported platforms: {', '.join(ARCHITECTURES)}",
        )
    return architecture
