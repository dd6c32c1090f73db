"""What a small job found out about GPUs of which Slurm's nodes tell a type at most; remembered by the user.

    inventory -> kinds_of -> ask (srun, one job for each kind) -> remember ... -> fill(inventory)

A type is taken for one kind of GPU in all of the cluster, GPUs without a type for one kind in each node. The
driver is known of the node that answered alone.
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
from imagefactory.gpu.values import slice_of
from imagefactory.schedulers.pool import Inventory, PoolGpu, PoolMachine
from imagefactory.schedulers.sizes import MB
from imagefactory.serialize import MaxRows, format_document, parse_document
from imagefactory.verify.outcome import clean

# --- Slurm's own commands, as the user runs them: scontrol, squeue, sbatch, scancel, srun


TIMEOUT = 60.0
AWAY = "run this on a login node of the cluster, or use --inventory FILE"


def run(
    argv: Sequence[str], environ: Mapping[str, str], folder: Path | None = None, timeout: float = TIMEOUT
) -> str:
    """What it printed. Raises ToolError where it is missing, fails or does not answer."""
    try:
        done = subprocess.run(
            argv,
            cwd=folder,
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
            "slurm-timeout", f"{argv[0]} did not answer within {timeout:.0f} s", hint="try again"
        ) from error
    said = done.stdout.decode("utf-8", "replace")
    if done.returncode:
        words = (done.stderr.decode("utf-8", "replace") or said).strip().splitlines()
        why = clean(words[-1]) if words else f"exit code {done.returncode}"
        raise ToolError(
            "slurm-command-failed",
            f"{argv[0]} failed: {why}",
            hint="check that sinfo works here; if not, " + AWAY,
        )
    return said


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
    """GPUs of a type, or those without one of a `node`."""

    type: str
    node: str = ""

    def __str__(self) -> str:
        return f"type {self.type}" if self.type else f"the GPUs of {self.node}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbedGpu:
    """What a GPU of that type said on that node. `memory` is in bytes, 0 where it does not tell it."""

    node: str
    type: str
    capability: str
    memory: int
    driver: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuMemoryRange:
    known: Annotated[tuple[ProbedGpu, ...], MaxRows(100_000)]


# --- deciding --------------------------------------------------------------------------------------


def gpu_types_of(inventory: Inventory) -> tuple[SlurmGpuType, ...]:
    """What is to be asked."""
    kinds = {
        SlurmGpuType(type=gpu.name, node="" if gpu.name else machine.name)
        for machine in inventory.machines
        for gpu in machine.gpus
    }
    return tuple(sorted(kinds, key=lambda kind: (kind.type, kind.node)))


def fill(inventory: Inventory, known: Sequence[ProbedGpu]) -> Inventory:
    """An inventory with what is known of its GPUs; what a job found goes before what a type's name says."""
    by_node = {(one.node, one.type): one for one in known}
    by_type = {one.type: one for one in known if one.type}

    def filled(machine: PoolMachine, gpu: PoolGpu) -> PoolGpu:
        exact = by_node.get((machine.name, gpu.name))
        told = exact or by_type.get(gpu.name)
        if told is None or gpu.mig:  # a slice has a size of its own
            return gpu
        driver = exact.driver if exact else ""
        shared = machine.attributes.get("memory", 0)  # of a GPU without memory of its own, in MB
        memory = told.memory or (shared * MB if isinstance(shared, int) else 0)
        return replace(gpu, capability=told.capability, memory=memory, driver=driver)

    machines = tuple(
        replace(machine, gpus=tuple(filled(machine, gpu) for gpu in machine.gpus))
        for machine in inventory.machines
    )
    return replace(inventory, machines=machines)


def parse_answer(text: str, kind: SlurmGpuType) -> ProbedGpu:
    """Raises ToolError for what no nvidia-smi says."""
    lines = text.splitlines()
    told = _PROBE_LINE.fullmatch(lines[1].strip()) if len(lines) == 2 else None
    if told is None:
        raise ToolError(
            "probe-output-invalid",
            f"nvidia-smi printed no GPU: '{clean(' / '.join(lines))[:100]}'",
            hint="run nvidia-smi on that node with srun",
        )
    memory = int(told[2]) * MB if told[2].isdigit() else 0  # [N/A]: it has none of its own, as GB10
    return ProbedGpu(node=clean(lines[0]), type=kind.type, capability=told[1], memory=memory, driver=told[3])


# --- acting ----------------------------------------------------------------------------------------


def probe_all(
    kinds: Sequence[SlurmGpuType], environ: Mapping[str, str], wait: timedelta
) -> tuple[tuple[ProbedGpu, ...], tuple[tuple[SlurmGpuType, ImagefactoryError], ...]]:
    """What a GPU of each kind says, and why others did not: each waits so long for one to be free."""

    def ask(kind: SlurmGpuType) -> ProbedGpu | ImagefactoryError:
        seconds = max(1, round(wait.total_seconds()))
        argv = ["srun", "--job-name=imagefactory-probe", f"--immediate={seconds}", "--time=5", "--mem=500M"]
        argv += ["--nodes=1", "--ntasks=1", f"--gres=gpu:{kind.type}:1" if kind.type else "--gres=gpu:1"]
        argv += [f"--nodelist={kind.node}"] if kind.node else []
        try:
            return parse_answer(
                run([*argv, "sh", "-c", PROBE_COMMAND], environ, timeout=seconds + 5 * TIMEOUT), kind
            )
        except ImagefactoryError as error:
            return error

    with ThreadPoolExecutor(AT_ONCE) as pool:
        answers = list(pool.map(ask, kinds))
    faults = [
        (kind, one) for kind, one in zip(kinds, answers, strict=True) if isinstance(one, ImagefactoryError)
    ]
    return tuple(one for one in answers if isinstance(one, ProbedGpu)), tuple(faults)


def place_of(environ: Mapping[str, str]) -> Path:
    """Where the user's memory lies. Source: XDG Base Directory Specification."""
    own = environ.get("XDG_STATE_HOME", "")
    home = Path(own) if own.startswith("/") else Path(environ.get("HOME") or "/") / ".local/state"
    return home / "imagefactory" / "slurm.json"


def read_probed(environ: Mapping[str, str]) -> tuple[ProbedGpu, ...]:
    """What was found out before. Raises UsageError for a file that was changed."""
    path = place_of(environ)
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
            f"{path} is not valid",
            hint="delete it, then run imagefactory gpus --probe 5m",
        ) from error
    return memory.known


def write_probed(environ: Mapping[str, str], found: Sequence[ProbedGpu]) -> None:
    """Keeps what was found out, in place of what was known of the same node and type."""
    known = {(one.node, one.type): one for one in (*read_probed(environ), *found)}
    path = place_of(environ)
    text = json.dumps(
        format_document(GpuMemoryRange(known=tuple(known[key] for key in sorted(known))), FORMAT), indent=1
    )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_text(path, f"{text}\n")
    except OSError as error:
        raise UsageError(*os_problem("write", path, error), hint="check its permissions") from error


# --- What Slurm tells of the GPUs of its nodes, by `scontrol show node --detail --oneliner`
# Slurm knows no capability, driver or memory of a GPU: a node tells the type that its site gave its GPUs
# (`Gres=gpu:a100:4`). A type that is the name of a known GPU tells the capability; of others none is known.
# Source: Slurm's manual, scontrol(1), "Generic Resource (GRES) Scheduling".


COMMAND = ("scontrol", "show", "node", "--detail", "--oneliner")
FEATURES = "features"
"""The attribute of a machine that holds its node's features, with commas between them."""
_FIELD = re.compile(r"(?:^| )([A-Za-z][A-Za-z0-9_/]*)=(\S*)")
_GRES = re.compile(r"gpu(?::(?P<type>[A-Za-z0-9_.+-]+))?:(?P<count>[0-9]+)(?:\((?P<told>[^)]*)\))?")
_HOSTS = {"x86_64": "amd64", "aarch64": "arm64"}
_AWAY = ("DOWN", "DRAIN", "DRAINED", "DRAINING", "FAIL", "FAILING", "FUTURE", "NOT_RESPONDING", "UNKNOWN")
_MOST = 1024


def query_inventory(environ: Mapping[str, str], now: datetime) -> Inventory:
    """The nodes with GPUs. Raises ToolError where scontrol is missing, fails or does not answer."""
    return parse_nodes(run(COMMAND, environ), now)


def parse_nodes(text: str, now: datetime) -> Inventory:
    """The nodes with GPUs of what scontrol printed, without those that take no jobs, which notes name."""
    machines, notes = [], []
    for line in text.splitlines():
        told = dict(reversed(_FIELD.findall(line)))  # free text, such as a reason, comes last
        name, gres = told.get("NodeName", ""), told.get("Gres", "")
        gpus = tuple(_gpus(name, told))
        if not name or not gpus:
            continue
        states = re.split(r"[+*~#!%$@^-]+", told.get("State", "UNKNOWN").upper())
        if away := next((state for state in states if state in _AWAY), ""):
            notes.append(f"{name} ({gres}) takes no jobs: {away}")
            continue
        attributes: dict[str, str | int | float | bool] = {"arch": told.get("Arch", "")}
        attributes[FEATURES] = told.get("ActiveFeatures", "").replace("(null)", "")
        for attribute, field in (("cpus", "CPUTot"), ("memory", "RealMemory")):
            if told.get(field, "").isdigit():
                attributes[attribute] = int(told[field])
        machines.append(PoolMachine(name=name, attributes=attributes, start="", gpus=gpus))
    return Inventory(pool="slurm", taken=now, machines=tuple(machines), notes=tuple(notes))


def _gpus(node: str, told: Mapping[str, str]) -> Iterator[PoolGpu]:
    used = {one["type"]: int(one["count"]) for one in _GRES.finditer(told.get("GresUsed", ""))}
    number = 0
    for found in _GRES.finditer(told.get("Gres", "")):
        kind = found["type"] or ""
        for place in range(min(int(found["count"]), _MOST)):
            yield PoolGpu(
                id=f"{node}/{number}",
                uuid="",
                name=kind,
                capability=capability_of(kind),
                memory=0,
                driver="",
                cuda="",
                mig=bool(slice_of(kind)),
                free=place >= used.get(found["type"], 0),
                host=_HOSTS.get(told.get("Arch", ""), ""),
            )
            number += 1


def capability_of(kind: str) -> str:
    """The capability of the GPUs that a site calls so, empty where the name does not tell it."""
    try:
        return str(find_gpu(kind).capability) if kind else ""
    except UsageError:
        return ""
