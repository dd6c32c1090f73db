"""A researcher's batch script for Slurm: text made of checked values. Pure.

    Form (image and what is proven of it) + Run + the cluster's nodes -> format_sbatch() -> FILE.sbatch

Slurm can be asked for a type of GPU, for features of nodes and for other nodes than some; never for what a
GPU can do. So the script asks for what the nodes of this cluster let it ask, and looks at the GPU that it
got before the program runs. Files are not sent: its machines see the folder of the script.
Source: Slurm's manual, sbatch(1) and "Generic Resource (GRES) Scheduling".
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta

from imagefactory.errors import CheckFailedError, UsageError
from imagefactory.jobs.htcondor import (
    CHECKPOINTED,
    RUN,
    JobImageSpec,
    SubmitCommand,
    check_columns,
    checked_address,
    checked_name,
    checked_path,
    checked_value,
    comments,
    requested_resources,
)
from imagefactory.jobs.offer import ResourceRequest, fits
from imagefactory.schedulers.pool import Inventory, PoolGpu
from imagefactory.schedulers.sizes import MB
from imagefactory.schedulers.slurm.batch import request_gpu_count
from imagefactory.settings.own_commands import TIME

# --- What a shell makes of a sweep: arrays of the columns' values, and words that take one of them. Pure
# Runs count from 1, so the first element of an array stands for no run.


_MACRO = re.compile(r"\$\(([A-Za-z_][A-Za-z0-9_]*)\)")
_WIDTH = 100


def value_arrays(run: SubmitCommand, rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """An array for each column. Raises UsageError, naming the run, for a row that does not fit."""
    for number, row in enumerate(rows, start=1):
        if len(row) != len(run.columns) - 1:
            raise UsageError(
                "sweep-values-invalid",
                f"run {number} has {len(row)} values, not {len(run.columns) - 1}",
                hint=f"write one value for each of {', '.join(run.columns[1:])}",
            )
    for place, name in enumerate(run.columns[1:]):
        words = (shlex.quote(checked_value(row[place], number)) for number, row in enumerate(rows, start=1))
        yield f"value_{name}=(none\n{_folded(words)}\n)"


def _folded(words: Iterable[str]) -> str:
    lines, line = [], "   "
    for word in words:
        if len(line) + len(word) + 1 > _WIDTH and line.strip():
            lines.append(line)
            line = "   "
        line += f" {word}"
    return "\n".join([*lines, line])


def format_run_argument(word: str, columns: Sequence[str], index: str) -> str:
    """One argument, in which `$(run)` and a sweep's columns are filled in when the job runs.

    `index` is the shell's variable that counts the runs. Raises UsageError for what cannot stand there.
    """
    known = {name.lower(): name for name in columns}
    parts, at = [], 0
    for found in _MACRO.finditer(word):
        name = known.get(found[1].lower())
        if name is None:
            raise no_macro(word, columns)
        parts.append(shlex.quote(word[at : found.start()]) if found.start() > at else "")
        parts.append(f'"${index}"' if name == RUN else f'"${{value_{name}[{index}]}}"')
        at = found.end()
    rest = word[at:]
    if not (word.isascii() and word.isprintable()):
        raise UsageError(
            "argument-not-ascii",
            f"{word[:80]!a} cannot be an argument in a script",
            hint="use printable ASCII",
        )
    return "".join([*parts, shlex.quote(rest) if rest or not parts else ""])


def no_macro(word: str, columns: Sequence[str]) -> UsageError:
    known = ", ".join(f"$({name})" for name in columns)
    return UsageError(
        "macro-unknown",
        f"unknown macro in '{word[:80]}'",
        hint=f"use one of {known}" if known else "macros require a sweep: --runs N or --params FILE",
    )


SUFFIX = ".sbatch"
INDEX = "SLURM_ARRAY_TASK_ID"
NOTICE = 120
"""Seconds before the end of a job's time in which its program may save what it has."""
CONSTRAINT_COMMENT = """\
# Of a GPU Slurm knows the name that its site gave it. One on which this image was not tried stops here.
# Its GPUs are those that CUDA shows: indices, beginnings of UUIDs or slices (MIG), up to an invalid entry.
gpus=$({ nvidia-smi -L; nvidia-smi --query-gpu=uuid,compute_cap --format=csv,noheader; } |
    awk -v visible="${CUDA_VISIBLE_DEVICES-}" '
    /UUID: / {
        uuid = $0
        sub(/.*UUID: /, "", uuid)
        sub(/[)].*/, "", uuid)
        if ($1 == "GPU") { whole = uuid; at[$2 + 0] = uuid }
        of[uuid] = whole
        next
    }
    split($0, pair, ", ") == 2 { gsub(/ /, "-", pair[2]); can[pair[1]] = pair[2] }
    END {
        count = split(visible, entry, ",")
        for (place = 1; place <= count; place++) {
            one = entry[place]
            uuid = ""
            fitting = 0
            if (one ~ /^ *[0-9]/) uuid = at[one + 0]
            else if (one ~ /^MIG-GPU-/) { sub(/^MIG-/, "", one); sub(/[/].*/, "", one); uuid = of[one] }
            else if (one ~ /^(GPU|MIG)-/)
                for (name in of) if (index(name, one) == 1) { uuid = of[name]; fitting++ }
            if (fitting > 1 || entry[place] in had) { found = ""; break }
            if (uuid == "") break
            had[entry[place]]
            found = found ((uuid in can) ? can[uuid] : "unknown") " "
        }
        printf "%%s", found
    }')
if [ -z "$gpus" ]; then
    echo "$(hostname): Slurm gave this job no GPU: CUDA_VISIBLE_DEVICES is '${CUDA_VISIBLE_DEVICES-}'" >&2
    exit 9
fi
takes=$(nvidia-smi | sed -n 's/.*CUDA Version: *\\([0-9.]*\\).*/\\1/p')
for gpu in $gpus; do
    case $gpu in
%s
    *)
        echo "$(hostname): this GPU has compute capability $gpu; the image is proven on %s" >&2
        exit 9
        ;;
    esac
    if [ "$(printf '%%s\\n' "$needs" "${takes:-0}" | sort -V | head -n 1)" != "$needs" ]; then
        echo "$(hostname): this driver takes CUDA ${takes:-of no version}; it must take $needs" >&2
        exit 9
    fi
done"""

RESUMED = f"""\
# Before its time is over, or where Slurm takes its place away, the program is told to save what it has.
trap 'kill -TERM "${{!:-}}" 2>/dev/null || :' TERM
%s &
program=$!
while kill -0 "$program" 2>/dev/null; do sleep 1 || :; done  # bash may miss a signal as it begins to wait
code=0
wait "$program" || code=$?
# So it says that it has, and is to be started again.
[ "$code" != {CHECKPOINTED} ] || scontrol requeue "$SLURM_JOB_ID"
exit "$code\""""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmRequest:
    """How a job asks for the GPUs it may run on: `lines` of #SBATCH, and the cluster's GPUs that they reach.

    `known` is whether the cluster's nodes were asked: without them any GPU is asked for.
    """

    lines: tuple[str, ...]
    gpus: tuple[PoolGpu, ...]
    total: int
    known: bool


NO_GPU = SlurmRequest(lines=(), gpus=(), total=0, known=False)
"""Of a job on CPUs alone."""


def request_gpus(taken: JobImageSpec, run: SubmitCommand, inventory: Inventory | None) -> SlurmRequest:
    """What to ask for so that a job gets GPUs of these classes, and no others.

    Raises CheckFailedError where the cluster has no such GPU, UsageError for a job that cannot say
    what it wants of one.
    """
    if run.gpu_memory:
        raise UsageError(
            "option-conflict",
            "--gpu-memory does not work with Slurm, which cannot select GPUs by memory",
            hint="remove --gpu-memory, and write the GPU type into the script: --gres=gpu:TYPE:1",
        )
    if inventory is None:
        return SlurmRequest(lines=(f"--gres=gpu:{run.gpus}",), gpus=(), total=0, known=False)
    right = {str(one.capability) for one in taken.classes}
    wish = ResourceRequest(platform=taken.platform, mig=run.mig)
    asked = request_gpu_count(inventory, lambda gpu: gpu.capability in right and fits(gpu, wish), run.gpus)
    if asked is None:
        raise _none_fits(inventory, right)
    lines, gpus = asked
    if not lines:
        types = sorted({gpu.name for gpu in inventory.gpus if gpu.capability in right and fits(gpu, wish)})
        raise UsageError(
            "gpu-type-ambiguous",
            f"every node with {' or '.join(types)} also has other GPUs, and Slurm may assign any of them",
            hint=f"write the type into the script yourself: --gres=gpu:{types[0]}:{run.gpus}",
        )
    return SlurmRequest(lines=lines, gpus=gpus, total=len(inventory.gpus), known=True)


def _none_fits(inventory: Inventory, right: Collection[str]) -> CheckFailedError:
    kinds = sorted({f"{gpu.name or 'of no type'} ({gpu.capability or '?'})" for gpu in inventory.gpus})
    return CheckFailedError(
        "no-matching-gpu",
        f"the image is verified on {', '.join(sorted(right))}, but this cluster has {', '.join(kinds)}",
        hint="choose another image (imagefactory search); ask the site for the capability of types with (?)",
    )


# --- the text ------------------------------------------------------------------------------------


def format_sbatch(
    taken: JobImageSpec,
    run: SubmitCommand,
    request: SlurmRequest,
    rows: Sequence[Sequence[str]],
    own: Sequence[str] = (),
) -> str:
    """The text of a batch script. `rows` are a sweep's, `own` options that the settings add.

    Raises UsageError for what cannot stand there.
    """
    for option, given in (("--input", run.inputs), ("--output-file", run.outputs), ("--disk", run.disk)):
        if given:
            raise UsageError(
                "option-conflict",
                f"{option} does not work with Slurm, whose nodes share this directory",
                hint=f"remove {option}",
            )
    check_columns(run.columns[1:])
    checked_name(run.name)
    memory, _ = requested_resources(taken.form.image, run)
    resumes = ["--requeue", "--open-mode=append", f"--signal=B:TERM@{NOTICE}"] if run.checkpoint else []
    told = [
        f"--job-name={run.name}",
        f"--output=%x_{'%A_%a' if run.columns else '%j'}.out",
        "--nodes=1",
        "--ntasks=1",
        f"--cpus-per-task={run.cpus}",
        f"--mem={-(-memory // MB)}M",
        *([f"--time={_time(run.time)}"] if run.time else []),
        *request.lines,
        *([f"--array=1-{len(rows)}"] if run.columns else []),
        *resumes,
        *(option for option in own if not (run.time and option.startswith(f"{TIME}="))),
    ]
    groups = [
        ["#!/bin/bash", *comments(taken, run)],
        [*(f"#SBATCH {line}" for line in told), *_advice(run, request, own)],
        ["set -eu"],
        [CONSTRAINT_COMMENT % (_cases(taken), _verified_text(taken))] if run.gpus else [],
        list(value_arrays(run, rows)),
        _what_runs(taken, run),
    ]
    return "\n\n".join("\n".join(group) for group in groups if group) + "\n"


def _advice(run: SubmitCommand, request: SlurmRequest, own: Sequence[str]) -> Iterator[str]:
    if run.gpus and not request.known:
        yield "# No cluster was at hand to ask: name the type of GPU, --gres=gpu:TYPE:1, or it may stop."
    time = "" if run.time else " --time=12:00:00"
    if not own:
        yield f"# What else the site wants: sbatch --account=NAME --partition=NAME{time} FILE"


def _cases(taken: JobImageSpec) -> str:
    return "\n".join(f"    {one.capability}) needs={one.cuda or 0} ;;" for one in taken.classes)


def _verified_text(taken: JobImageSpec) -> str:
    return ", ".join(str(one.capability) for one in taken.classes)


def _what_runs(taken: JobImageSpec, run: SubmitCommand) -> list[str]:
    image = checked_address(taken.form.image.address)
    below = "../" if run.columns else ""
    if "://" not in image and not image.startswith("/"):
        image = f"{below}{image}"
    program = checked_path(run.executable)
    if not run.in_image and not program.startswith("/"):
        program = f"{below or './'}{program.removeprefix('./')}"
    words = [shlex.quote(program), *(format_run_argument(word, run.columns, INDEX) for word in run.arguments)]
    start = ["apptainer", "exec", *(["--nv"] if run.gpus else []), "--env", "PYTHONNOUSERSITE=1"]
    seen = '--bind "$SLURM_SUBMIT_DIR" --pwd "$PWD"'
    command = f"{' '.join(start)} {seen} \\\n    {shlex.quote(image)} \\\n    {' '.join(words)}"
    folder = [f'mkdir -p "run-${INDEX}"', f'cd "run-${INDEX}"'] if run.columns else []
    return [
        *folder,
        "# where apptainer is a module: module load apptainer",
        RESUMED % command if run.checkpoint else f"exec {command}",
    ]


def _time(time: timedelta) -> str:
    """`2-03:00:00`, as sbatch takes it; a part of a second is a second."""
    seconds = -(-int(time.total_seconds() * 10) // 10)
    days, rest = divmod(seconds, 86_400)
    return f"{days}-{rest // 3600:02}:{rest // 60 % 60:02}:{rest % 60:02}"


def format_reach(request: SlurmRequest) -> str:
    """`reaches 12 of 40 GPUs, 3 free now`; empty where no cluster was asked."""
    if not request.known:
        return ""
    free = sum(gpu.free for gpu in request.gpus)
    total = f"{request.total} GPU{'s' * (request.total != 1)}"
    return f"reaches {len(request.gpus)} of {total}, {free} free now; of their drivers Slurm tells nothing"
