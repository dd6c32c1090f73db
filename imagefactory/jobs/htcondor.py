"""Write the submit file of a job for HTCondor, and the DAG of a sweep. Pure functions.

Sources: HTCondor manual, condor_submit(1), "Container Universe Jobs" and "DAGMan".
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from imagefactory.gpu.knowledge.tables import numbers
from imagefactory.jobs.offer import GpuClass, is_range
from imagefactory.jobs.spec import (
    ARCHITECTURES,
    CHECKPOINTED,
    GATHER,
    JOB_MACROS,
    MACRO,
    RUN,
    JobSpec,
    gather_job,
    header,
    run_directory,
)
from imagefactory.schedulers.htcondor.ads import WHOLE_GPU_EXPRESSION, amd_name_expression
from imagefactory.schedulers.sizes import MB, format_size

SUFFIX = ".sub"
AMD_MACHINE = '(versionGE(substr(TARGET.CondorVersion, 16), "25.8.2"))'
"""A machine that opens AMD GPUs to containers (--rocm): its version begins `$CondorVersion: 25.8.2`. Source:
HTCondor version history, 25.8.2.
"""


def write_htcondor(spec: JobSpec) -> dict[str, str]:
    """Return the texts by file name: the submit file, and for a sweep the finalizing job and the DAG."""
    submit, last = f"{spec.name}{SUFFIX}", f"{spec.name}-{GATHER}{SUFFIX}"
    # DAGMan looks for them from the directory of condor_submit_dag's call, not from that of the DAG.
    parent = f"{spec.directory}/" if spec.directory else ""
    files = {submit: _format_submit(spec)}
    if spec.gather:
        files[last] = _format_submit(gather_job(spec))
    if spec.columns:
        lines = [f"JOB {GATHER} {parent}{last}"] if spec.gather else []
        for number, row in enumerate(spec.rows, start=1):
            node = run_directory(number)
            values = [(RUN, str(number)), *zip(map(_macro_of, spec.columns[1:]), row, strict=True)]
            macros = " ".join(f'{name}="{value}"' for name, value in values)
            lines += [f"JOB {node} {parent}{submit}", f"VARS {node} {macros}"]
            lines += [f"PARENT {node} CHILD {GATHER}"] if spec.gather else []
        files[f"{spec.name}.dag"] = "\n".join(lines) + "\n"
    return files


def _format_submit(spec: JobSpec) -> str:
    site, address = spec.site, spec.image.address
    amd = any(gpu_class.capability.processor for gpu_class in spec.classes)
    needs = [
        f'(Arch == "{ARCHITECTURES[spec.platform]}")',
        *([AMD_MACHINE] if amd and spec.gpus else []),
        *site.requirements(address),
    ]
    options = {"gpus": bool(spec.gpus), "resumes": bool(spec.checkpoint)}
    groups = [
        header(spec),
        # Machines share a file at an absolute path, so it is not sent with each job.
        [
            "universe = container",
            f"container_image = {_from_run(address, spec)}",
            *(["transfer_container = false"] if address.startswith("/") else []),
        ],
        _program(spec),
        [
            *([f"request_gpus = {spec.gpus}"] if spec.gpus else []),
            *(format_gpu_request(spec.classes, spec.gpu_memory, slices=spec.mig) if spec.gpus else []),
            f"requirements = {' && '.join(needs)}",
        ],
        [
            f"request_cpus = {spec.cpus}",
            f"request_memory = {format_size(spec.requested_memory)}",
            *_retry(spec),
            f"request_disk = {format_size(spec.requested_disk)}",
        ],
        [*site.lines(spec.time, **options), *(f"# {line}" for line in site.comments(**options))],
        _logs(spec),
        ["queue"],
    ]
    return "\n\n".join("\n".join(group) for group in groups if group) + "\n"


def _retry(spec: JobSpec) -> list[str]:
    """Return the line by which HTCondor 25 and newer restart a job that exceeded its memory, once."""
    more = spec.requested_memory + spec.retry_memory
    return [f"retry_request_memory = {format_size(more)}"] if spec.retry_memory else []


def format_gpu_request(classes: Sequence[GpuClass], memory: int = 0, *, slices: bool = False) -> list[str]:
    """Return the lines that match exactly these classes of GPUs, each GPU with at least `memory` bytes.

    `classes` is not empty and has no capability twice. With `slices`, MIG slices of such GPUs match too.

        one range, one driver    gpus_minimum_capability, gpus_maximum_capability, gpus_minimum_runtime
        otherwise                require_gpus = member(Capability, {7.0, 8.0}) && DriverVersion >= 12.4
        AMD                      require_gpus = Capability == 9.0 && regexp("...MI210...", DeviceName, "i")

    A name in `require_gpus` silently cancels the limits that `gpus_*` set for it (condor_submit manual), so
    the two forms compare different names. `gpus_minimum_runtime` is compared with `MaxSupportedVersion`
    (12040), and `DriverVersion` is a float (12.4). Both are the newest CUDA version that the driver supports.
    """
    classes = sorted(classes, key=lambda gpu_class: gpu_class.capability)
    if classes[0].capability.processor:
        either = " || ".join(f"({amd_name_expression(gpu_class.capability)})" for gpu_class in classes)
        size = f" && GlobalMemoryMb >= {-(-memory // MB)}" if memory else ""
        return [f"require_gpus = ({either}){size}" if size else f"require_gpus = {either}"]
    cudas = sorted({gpu_class.cuda for gpu_class in classes}, key=lambda cuda: numbers(cuda or "0"))
    capabilities = [gpu_class.capability for gpu_class in classes]
    whole = [] if slices else [WHOLE_GPU_EXPRESSION]
    if len(cudas) == 1 and is_range(capabilities):
        return [
            f"gpus_minimum_capability = {capabilities[0]}",
            f"gpus_maximum_capability = {capabilities[-1]}",
            *([f"gpus_minimum_runtime = {cudas[0]}"] if cudas[0] else []),
            *([f"gpus_minimum_memory = {format_size(memory)}"] if memory else []),
            *(f"require_gpus = {expression}" for expression in whole),
        ]
    groups = []
    for cuda in cudas:
        names = [str(gpu_class.capability) for gpu_class in classes if gpu_class.cuda == cuda]
        listed = ", ".join(names)
        group = f"Capability == {listed}" if len(names) == 1 else f"member(Capability, {{{listed}}})"
        groups.append(f"{group} && DriverVersion >= {cuda}" if cuda else group)
    expression = groups[0] if len(groups) == 1 else " || ".join(f"({group})" for group in groups)
    more = [*([f"GlobalMemoryMb >= {-(-memory // MB)}"] if memory else []), *whole]
    first = f"({expression})" if more and len(groups) > 1 else expression
    return [f"require_gpus = {' && '.join([first, *more])}"]


def _program(spec: JobSpec) -> list[str]:
    """Return the commands for the program. A run of a sweep starts one level below the submit file."""
    lines = [f"executable = {spec.executable}"]
    lines += ["transfer_executable = false"] if spec.in_image else []
    if spec.arguments:
        lines.append(f"arguments = {format_arguments(spec.arguments, spec.columns)}")
    lines += [f"initialdir = run-$({RUN})"] if spec.columns else []
    if spec.inputs:
        lines.append(f"transfer_input_files = {', '.join(_from_run(path, spec) for path in spec.inputs)}")
    lines += [f"transfer_output_files = {', '.join(spec.outputs)}"] if spec.outputs else []
    lines += ["should_transfer_files = YES", "when_to_transfer_output = ON_EXIT"]
    if spec.checkpoint:
        lines += [
            f"checkpoint_exit_code = {CHECKPOINTED}",
            f"transfer_checkpoint_files = {spec.checkpoint}",
        ]
    return lines


def _from_run(path: str, spec: JobSpec) -> str:
    """Return a path or an address relative to the directory in which the job starts."""
    near = not path.startswith("/") and "://" not in path
    return f"../{path.removeprefix('./')}" if spec.columns and near else path


def _logs(spec: JobSpec) -> list[str]:
    name = "job" if spec.columns else f"{spec.name}_$(Cluster)_$(Process)"
    attributes = "ulog_execute_attrs = GPUs_DeviceName, GPUs_Capability, GPUs_DriverVersion"
    return [
        f"log = {name}.log",
        f"output = {name}.out",
        f"error = {name}.err",
        *([attributes] if spec.gpus else []),
    ]


def format_arguments(words: Sequence[str], columns: Sequence[str] = ()) -> str:
    """Return the value of `arguments` in HTCondor's new syntax, in double quotes.

    Inside, single quotes keep a word together, and quotes of both types are written twice.
    """
    macros = {name.lower(): name for name in (*JOB_MACROS, RUN)}
    macros |= {name.lower(): _macro_of(name) for name in columns if name != RUN}
    quoted = []
    for word in words:
        text = MACRO.sub(lambda macro: f"$({macros[macro[1].lower()]})", word)
        text = text.replace('"', '""').replace("'", "''")
        quoted.append(f"'{text}'" if not word or MACRO.search(word) or re.search(r"[\s']", word) else text)
    return f'"{" ".join(quoted)}"'


def _macro_of(column: str) -> str:
    """Return the macro name of a column. A macro named `rank` or `input` would be that command of the job."""
    return f"value_{column}"
