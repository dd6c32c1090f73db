"""The GPUs of Slurm nodes: from `scontrol show node`, and from small jobs that probe them.

    inventory -> gpu_types_of -> probe_all (srun, one job for each type) -> write_probed ... ->
    fill(inventory)

Slurm does not know the capability, driver and memory of a GPU. A node has the type that its site chose
(`Gres=gpu:a100:4`). If that is the name of a known GPU, its capability is known. All GPUs of one type in a
cluster count as equal, and so do GPUs without a type in one node. The driver is known only for the probed
node. Source: Slurm manual, scontrol(1), "Generic Resource (GRES) Scheduling".
"""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Annotated

from imagefactory.errors import ImagefactoryError, StatementError, ToolError, UsageError, os_problem
from imagefactory.fs import replace_text
from imagefactory.gpu.knowledge.gpus import find_gpu
from imagefactory.gpu.values import mig_profile
from imagefactory.schedulers.pool import Inventory, PoolGpu, PoolMachine
from imagefactory.schedulers.sizes import MB
from imagefactory.serialize import MaxRows, format_document, parse_document
from imagefactory.verify.outcome import clean

TIMEOUT = 60.0
AWAY = "run this on a login node of the cluster, or use --inventory FILE"


def run(
    argv: Sequence[str], environ: Mapping[str, str], directory: Path | None = None, timeout: float = TIMEOUT
) -> str:
    """Return the output of a Slurm command. Raises ToolError if it is missing, fails or does not answer."""
    try:
        ended = subprocess.run(
            argv,
            cwd=directory,
            env={**environ, "LC_ALL": "C"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=timeout,
            check=False,
        )
    except FileNotFoundError as error:
        raise ToolError("tool-missing", f"{argv[0]} is not installed on this machine", hint=AWAY) from error
    except subprocess.TimeoutExpired as error:
        raise ToolError(
            "slurm-timeout",
            f"{argv[0]} did not answer within {timeout:.0f} s",
            hint="check the controller with scontrol ping, then run the command again",
        ) from error
    output = ended.stdout.decode("utf-8", "replace")
    if ended.returncode:
        lines = (ended.stderr.decode("utf-8", "replace") or output).strip().splitlines()
        reason = clean(lines[-1]) if lines else f"exit code {ended.returncode}"
        raise ToolError(
            "slurm-command-failed",
            f"{argv[0]} failed: {reason}",
            hint="check that sinfo works here; if not, " + AWAY,
        )
    return output


FORMAT = 1
AT_ONCE = 16
PROBE_COMMAND = (
    'echo "$SLURMD_NODENAME" && exec nvidia-smi --id="$CUDA_VISIBLE_DEVICES" '
    "--query-gpu=compute_cap,memory.total,driver_version --format=csv,noheader,nounits"
)
_PROBE_LINE = re.compile(
    r"([1-9][0-9]?\.[0-9]), ([0-9]{1,8}|\[[A-Za-z /]{1,30}\]), ([0-9]{3,4}(?:\.[0-9]{1,4}){1,2})"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmGpuType:
    """The GPUs of a type, or the GPUs without a type in a `node`."""

    type: str
    node: str = ""

    def __str__(self) -> str:
        return f"type {self.type}" if self.type else f"the GPUs of {self.node}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbedGpu:
    """The probed values of a GPU of that type on that node.

    `memory` is in bytes, 0 if it shares the host's memory.
    """

    node: str
    type: str
    capability: str
    memory: int
    driver: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuMemoryRange:
    known: Annotated[tuple[ProbedGpu, ...], MaxRows(100_000)]


def gpu_types_of(inventory: Inventory) -> tuple[SlurmGpuType, ...]:
    """Return the types to probe."""
    types = {
        SlurmGpuType(type=gpu.name, node="" if gpu.name else machine.name)
        for machine in inventory.machines
        for gpu in machine.gpus
    }
    return tuple(sorted(types, key=lambda row: (row.type, row.node)))


def fill(inventory: Inventory, known: Sequence[ProbedGpu]) -> Inventory:
    """Return an inventory with the probed values, which override the name of a type."""
    by_node = {(row.node, row.type): row for row in known}
    by_type = {row.type: row for row in known if row.type}

    def filled(machine: PoolMachine, gpu: PoolGpu) -> PoolGpu:
        exact = by_node.get((machine.name, gpu.name))
        answer = exact or by_type.get(gpu.name)
        if answer is None or gpu.mig:  # a slice has a size of its own
            return gpu
        shared = machine.attributes.get("memory", 0)  # of a GPU without memory of its own, in MB
        memory = answer.memory or (shared * MB if isinstance(shared, int) else 0)
        driver = exact.driver if exact else ""
        return replace(gpu, capability=answer.capability, memory=memory, driver=driver)

    machines = tuple(
        replace(machine, gpus=tuple(filled(machine, gpu) for gpu in machine.gpus))
        for machine in inventory.machines
    )
    return replace(inventory, machines=machines)


def parse_answer(text: str, gpu_type: SlurmGpuType) -> ProbedGpu:
    """Parse the output of nvidia-smi. Raises ToolError for other output."""
    lines = text.splitlines()
    match = _PROBE_LINE.fullmatch(lines[1].strip()) if len(lines) == 2 else None
    if match is None:
        raise ToolError(
            "probe-output-invalid",
            f"nvidia-smi printed no GPU: '{clean(' / '.join(lines))[:100]}'",
            hint="run nvidia-smi on that node with srun",
        )
    capability, size, driver = match.groups()
    memory = int(size) * MB if size.isdigit() else 0  # [N/A]: it has none of its own, as GB10
    return ProbedGpu(
        node=clean(lines[0]), type=gpu_type.type, capability=capability, memory=memory, driver=driver
    )


def probe_all(
    types: Sequence[SlurmGpuType], environ: Mapping[str, str], wait: timedelta
) -> tuple[tuple[ProbedGpu, ...], tuple[tuple[SlurmGpuType, ImagefactoryError], ...]]:
    """Probe a GPU of each type. Return the probed GPUs and the errors. Each probe waits for a free GPU."""
    seconds = max(1, round(wait.total_seconds()))

    def probe(row: SlurmGpuType) -> ProbedGpu | ImagefactoryError:
        argv = ["srun", "--job-name=imagefactory-probe", f"--immediate={seconds}", "--time=5", "--mem=500M"]
        argv += ["--nodes=1", "--ntasks=1", f"--gres=gpu:{row.type}:1" if row.type else "--gres=gpu:1"]
        argv += [f"--nodelist={row.node}"] if row.node else []
        argv += ["sh", "-c", PROBE_COMMAND]
        try:
            return parse_answer(run(argv, environ, timeout=seconds + 5 * TIMEOUT), row)
        except ImagefactoryError as error:
            return error

    with ThreadPoolExecutor(AT_ONCE) as pool:
        answers = list(pool.map(probe, types))
    faults = [
        (row, answer)
        for row, answer in zip(types, answers, strict=True)
        if isinstance(answer, ImagefactoryError)
    ]
    return tuple(answer for answer in answers if isinstance(answer, ProbedGpu)), tuple(faults)


def probe_file(environ: Mapping[str, str]) -> Path:
    """Return the path of the user's file of probes. Source: XDG Base Directory Specification."""
    state_home = environ.get("XDG_STATE_HOME", "")
    home = (
        Path(state_home) if state_home.startswith("/") else Path(environ.get("HOME") or "/") / ".local/state"
    )
    return home / "imagefactory" / "slurm.json"


def read_probed(environ: Mapping[str, str]) -> tuple[ProbedGpu, ...]:
    """Return the GPUs of earlier probes. Raises UsageError for an invalid file."""
    path = probe_file(environ)
    try:
        memory: GpuMemoryRange = parse_document(
            json.loads(path.read_bytes()), GpuMemoryRange, FORMAT, str(path)
        )
    except FileNotFoundError:
        return ()
    except OSError as error:
        raise UsageError(*os_problem("read", path, error), hint="check its permissions") from error
    except (ValueError, RecursionError, StatementError) as error:
        raise UsageError(
            "probe-file-invalid",
            f"{path} is not a valid file of GPU probes",
            hint="delete it, then run imagefactory gpus --probe 5m",
        ) from error
    return memory.known


def write_probed(environ: Mapping[str, str], answers: Sequence[ProbedGpu]) -> None:
    """Store probed GPUs. They replace those of the same node and type."""
    known = {(row.node, row.type): row for row in (*read_probed(environ), *answers)}
    path = probe_file(environ)
    value = GpuMemoryRange(known=tuple(known[key] for key in sorted(known)))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_text(path, json.dumps(format_document(value, FORMAT), indent=1) + "\n")
    except OSError as error:
        raise UsageError(*os_problem("write", path, error), hint="check its permissions") from error


COMMAND = ("scontrol", "show", "node", "--detail", "--oneliner")
FEATURES = "features"
"""The machine attribute with the features of its node, separated by commas."""
_FIELD = re.compile(r"(?:^| )([A-Za-z][A-Za-z0-9_/]*)=(\S*)")
_GRES = re.compile(r"gpu(?::(?P<type>[A-Za-z0-9_.+-]+))?:(?P<count>[0-9]+)(?:\([^)]*\))?")
_HOSTS = {"x86_64": "amd64", "aarch64": "arm64"}
_AWAY = ("DOWN", "DRAIN", "DRAINED", "DRAINING", "FAIL", "FAILING", "FUTURE", "NOT_RESPONDING", "UNKNOWN")
_MOST = 1024


def query_inventory(environ: Mapping[str, str], now: datetime) -> Inventory:
    """Return the nodes with GPUs. Raises ToolError if scontrol is missing, fails or does not answer."""
    return parse_nodes(run(COMMAND, environ), now)


def parse_nodes(text: str, now: datetime) -> Inventory:
    """Return the nodes with GPUs in the output of scontrol. Notes name the nodes that take no jobs."""
    machines, notes = [], []
    for line in text.splitlines():
        fields = dict(reversed(_FIELD.findall(line)))  # free text, such as a reason, comes last
        name, gres = fields.get("NodeName", ""), fields.get("Gres", "")
        gpus = tuple(_gpus(name, fields))
        if not name or not gpus:
            continue
        states = re.split(r"[+*~#!%$@^-]+", fields.get("State", "UNKNOWN").upper())
        if away := next((state for state in states if state in _AWAY), ""):
            notes.append(f"{name} ({gres}) takes no jobs: {away}")
            continue
        attributes: dict[str, str | int | float | bool] = {"arch": fields.get("Arch", "")}
        attributes[FEATURES] = fields.get("ActiveFeatures", "").replace("(null)", "")
        for attribute, field in (("cpus", "CPUTot"), ("memory", "RealMemory")):
            if fields.get(field, "").isdigit():
                attributes[attribute] = int(fields[field])
        machines.append(PoolMachine(name=name, attributes=attributes, start="", gpus=gpus))
    return Inventory(pool="slurm", taken=now, machines=tuple(machines), notes=tuple(notes))


def _gpus(node: str, fields: Mapping[str, str]) -> Iterator[PoolGpu]:
    used = {gres["type"]: int(gres["count"]) for gres in _GRES.finditer(fields.get("GresUsed", ""))}
    number = 0
    for gres in _GRES.finditer(fields.get("Gres", "")):
        name = gres["type"] or ""
        for job_directory in range(min(int(gres["count"]), _MOST)):
            yield PoolGpu(
                id=f"{node}/{number}",
                uuid="",
                name=name,
                capability=capability_of(name),
                memory=0,
                driver="",
                cuda="",
                mig=bool(mig_profile(name)),
                free=job_directory >= used.get(gres["type"], 0),
                host=_HOSTS.get(fields.get("Arch", ""), ""),
            )
            number += 1


def capability_of(name: str) -> str:
    """Return the capability for a GPU type, empty if the name is unknown."""
    try:
        return str(find_gpu(name).capability) if name else ""
    except UsageError:
        return ""
