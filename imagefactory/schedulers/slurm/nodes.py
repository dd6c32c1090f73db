"""What a small job found out about GPUs of which Slurm's nodes tell a type at most; remembered by the user.

    inventory -> kinds_of -> ask (srun, one job for each kind) -> remember ... -> fill(inventory)

A type is taken for one kind of GPU in all of the cluster, GPUs without a type for one kind in each node. The
driver is known of the node that answered alone.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Annotated

from imagefactory.serialize import Most, format_document, parse_document
from imagefactory.errors import FactoryError, StatementError, ToolError, UsageError, os_problem
from imagefactory.fs import replace_text
from imagefactory.schedulers.pool import Inventory, PoolGpu, PoolMachine
from imagefactory.schedulers.sizes import MB
from imagefactory.pools.slurm.commands import TIMEOUT, run
from imagefactory.verify.suite_report import clean

FORMAT = 1
AT_ONCE = 16
LOOK = (
    'echo "$SLURMD_NODENAME" && exec nvidia-smi --id="$CUDA_VISIBLE_DEVICES" '
    "--query-gpu=compute_cap,memory.total,driver_version --format=csv,noheader,nounits"
)
_TOLD = re.compile(
    r"([1-9][0-9]?\.[0-9]), ([0-9]{1,8}|\[[A-Za-z /]{1,30}\]), ([0-9]{3,4}(?:\.[0-9]{1,4}){1,2})"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """GPUs of a type, or those without one of a `node`."""

    type: str
    node: str = ""

    def __str__(self) -> str:
        return f"type {self.type}" if self.type else f"the GPUs of {self.node}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """What a GPU of that type said on that node. `memory` is in bytes, 0 where it does not tell it."""

    node: str
    type: str
    capability: str
    memory: int
    driver: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    known: Annotated[tuple[Known, ...], Most(100_000)]


# --- deciding --------------------------------------------------------------------------------------


def kinds_of(inventory: Inventory) -> tuple[Kind, ...]:
    """What is to be asked."""
    kinds = {
        Kind(type=gpu.name, node="" if gpu.name else machine.name)
        for machine in inventory.machines
        for gpu in machine.gpus
    }
    return tuple(sorted(kinds, key=lambda kind: (kind.type, kind.node)))


def fill(inventory: Inventory, known: Sequence[Known]) -> Inventory:
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


def parse_answer(text: str, kind: Kind) -> Known:
    """Raises ToolError for what no nvidia-smi says."""
    lines = text.splitlines()
    told = _TOLD.fullmatch(lines[1].strip()) if len(lines) == 2 else None
    if told is None:
        raise ToolError(
            "probe-output-invalid",
            f"nvidia-smi printed no GPU: '{clean(' / '.join(lines))[:100]}'",
            hint="run nvidia-smi on that node with srun",
        )
    memory = int(told[2]) * MB if told[2].isdigit() else 0  # [N/A]: it has none of its own, as GB10
    return Known(node=clean(lines[0]), type=kind.type, capability=told[1], memory=memory, driver=told[3])


# --- acting ----------------------------------------------------------------------------------------


def ask_all(
    kinds: Sequence[Kind], environ: Mapping[str, str], wait: timedelta
) -> tuple[tuple[Known, ...], tuple[tuple[Kind, FactoryError], ...]]:
    """What a GPU of each kind says, and why others did not: each waits so long for one to be free."""

    def ask(kind: Kind) -> Known | FactoryError:
        seconds = max(1, round(wait.total_seconds()))
        argv = ["srun", "--job-name=imagefactory-probe", f"--immediate={seconds}", "--time=5", "--mem=500M"]
        argv += ["--nodes=1", "--ntasks=1", f"--gres=gpu:{kind.type}:1" if kind.type else "--gres=gpu:1"]
        argv += [f"--nodelist={kind.node}"] if kind.node else []
        try:
            return parse_answer(run([*argv, "sh", "-c", LOOK], environ, timeout=seconds + 5 * TIMEOUT), kind)
        except FactoryError as error:
            return error

    with ThreadPoolExecutor(AT_ONCE) as pool:
        answers = list(pool.map(ask, kinds))
    faults = [(kind, one) for kind, one in zip(kinds, answers, strict=True) if isinstance(one, FactoryError)]
    return tuple(one for one in answers if isinstance(one, Known)), tuple(faults)


def place_of(environ: Mapping[str, str]) -> Path:
    """Where the user's memory lies. Source: XDG Base Directory Specification."""
    own = environ.get("XDG_STATE_HOME", "")
    home = Path(own) if own.startswith("/") else Path(environ.get("HOME") or "/") / ".local/state"
    return home / "imagefactory" / "slurm.json"


def recall(environ: Mapping[str, str]) -> tuple[Known, ...]:
    """What was found out before. Raises UsageError for a file that was changed."""
    path = place_of(environ)
    try:
        memory: Memory = parse_document(json.loads(path.read_bytes()), Memory, FORMAT, str(path))
    except FileNotFoundError:
        return ()
    except OSError as error:
        raise UsageError(*os_problem("read", path, error), hint="check its permissions") from error
    except (ValueError, RecursionError, StatementError) as error:
        raise UsageError(
            "probe-file-invalid",
            f"{path} is not valid",
            hint="delete it, then run imagefactory pool --probe 5m",
        ) from error
    return memory.known


def remember(environ: Mapping[str, str], found: Sequence[Known]) -> None:
    """Keeps what was found out, in place of what was known of the same node and type."""
    known = {(one.node, one.type): one for one in (*recall(environ), *found)}
    path = place_of(environ)
    text = json.dumps(
        format_document(Memory(known=tuple(known[key] for key in sorted(known))), FORMAT), indent=1
    )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_text(path, f"{text}\n")
    except OSError as error:
        raise UsageError(*os_problem("write", path, error), hint="check its permissions") from error
