"""PyTorch on several GPUs: one process of `ranks.py`. A rehearsal runs on the CPU, with gloo."""

from __future__ import annotations

import array
import contextlib
import hashlib
import importlib
import itertools
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

from ...context import CheckFailure
from .. import reference, table

REPEATS = 5
# Seconds that a node waits for the others, which may pull the image first, and then for one operation.
MEET_SECONDS, SUM_SECONDS = 600, 120
PERIOD = 1021
"""The length of the pattern that nodes sum, a prime."""

# Of NCCL's log: its texts about networks, plug-ins and variables.
LOG_MARKS = ("NET", "network", "plugin", "Plugin", "libibverbs", "set by environment")
LOG_BYTES, LONGEST, MOST_LINES = 1 << 20, 400, 400

# Tensors of a group must outlive it. Otherwise a thread of gloo drops the last reference, for which it needs
# the interpreter's lock, and the group's end waits for that thread with the lock: torch 2.3 hung in two runs
# of three.
_alive: list[Any] = []

Job = Mapping[str, Any]
Answer = dict[str, Any]


def run(job: Job, rank: int, folder: str) -> Answer:
    """Return the answer of process `rank`. All processes meet in `folder`."""
    torch = importlib.import_module("torch")
    torch.backends.cuda.matmul.allow_tf32 = False
    if job["what"] in ("transport", "nodes"):
        log = os.path.join(folder, f"nccl-{rank}.log")
        os.environ.update({"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,NET,ENV", "NCCL_DEBUG_FILE": log})
    if job["what"] == "copies":
        return {"copies": list(copies(torch, job))}
    if job["what"] == "nodes":
        hosts, sums = over_nodes(torch, job)
        return {"hosts": hosts, "sums": sums, "log": read_log(log)}
    with grouped(torch, job, rank, folder) as distributed:
        if job["what"] == "all-reduce":
            return {"sums": [all_reduce(torch, distributed, job, rank, size) for size in job["sizes"]]}
        if job["what"] == "transport":
            distributed.all_reduce(torch.zeros(1, device=device_of(torch, job, rank)))
            return {"log": read_log(log)}
        return train(torch, job, rank)


def read_log(path: str) -> list[str]:
    """Return the lines of NCCL's log about networks. gloo writes none."""
    if not os.path.exists(path):
        return []
    with open(path, encoding="utf-8", errors="replace") as file:
        lines = file.read(LOG_BYTES).splitlines()
    texts = [line.partition(" NCCL ")[2][:LONGEST] for line in lines]
    return [text for text in texts if any(mark in text for mark in LOG_MARKS)][:MOST_LINES]


def count(context: Any) -> int:
    """Return the number of GPUs that torch counts, or of the two processes in a rehearsal."""
    return 2 if context.rehearsal else int(importlib.import_module("torch").cuda.device_count())


@contextlib.contextmanager
def grouped(torch: Any, job: Job, rank: int, folder: str) -> Iterator[Any]:
    """Open the group of all processes, which meet through a file, so without a network.

    One process needs no group.
    """
    distributed = importlib.import_module("torch.distributed")
    if not job["rehearsal"]:
        torch.cuda.set_device(rank)
    if job["ranks"] == 1:
        yield distributed
        return
    distributed.init_process_group(
        "gloo" if job["rehearsal"] else "nccl",
        init_method=f"file://{folder}/meet",
        rank=rank,
        world_size=job["ranks"],
    )
    yield distributed
    leave(distributed, job)


def leave(distributed: Any, job: Job) -> None:
    """Close the group, except of gloo: its close waits forever for a process that closed just before.

    Measured with PyTorch 2.3 on a busy machine. The process ends at once, which closes everything.
    """
    if not job["rehearsal"]:
        distributed.destroy_process_group()


def device_of(torch: Any, job: Job, rank: int) -> Any:
    return torch.device("cpu") if job["rehearsal"] else torch.device("cuda", rank)


def fetch(tensor: Any, device: Any) -> Any:
    if tensor.device != device:
        raise CheckFailure(f"torch computed on {tensor.device}, not on {device}")
    return tensor.detach().cpu().numpy()


def timed(torch: Any, devices: Sequence[Any], call: Callable[[], Any]) -> float:
    """Return the seconds until `devices` finish, the median of a few."""
    times = []
    for _ in range(REPEATS):
        began = wait(torch, devices)
        call()
        times.append(wait(torch, devices) - began)
    return sorted(times)[REPEATS // 2]


def wait(torch: Any, devices: Sequence[Any]) -> float:
    for device in devices:
        if device.type != "cpu":
            torch.cuda.synchronize(device)
    return time.perf_counter()


def copies(torch: Any, job: Job) -> Iterator[Answer]:
    """Copy from each GPU to each other one. The data differs by pair, so older data cannot pass."""
    whole = reference.numbers(51, (job["bytes"] // 4,), "float32").astype("float32").view("int32")
    for start, end in itertools.permutations(range(job["gpus"]), 2):
        here, there = (device_of(torch, job, rank) for rank in (start, end))
        sent = whole ^ reference.numpy.int32(1 + start * job["gpus"] + end)
        tensor = torch.from_numpy(sent).to(here)
        back = fetch(tensor.to(there, copy=True), there)
        yield {
            "from": start,
            "to": end,
            "exact": back.tobytes() == sent.tobytes(),
            "direct": not job["rehearsal"] and bool(torch.cuda.can_device_access_peer(start, end)),
            "seconds": timed(torch, (here, there), partial(tensor.to, there, copy=True)),
        }


def all_reduce(torch: Any, distributed: Any, job: Job, rank: int, size: int) -> Answer:
    device = device_of(torch, job, rank)
    values = reference.integers(job["seed"] + rank, size // 4).astype("float32")
    tensor = torch.from_numpy(values).to(device)
    distributed.all_reduce(tensor)
    sums = fetch(tensor, device)
    zeros = torch.zeros_like(tensor)
    _alive.extend((tensor, zeros))
    seconds = timed(torch, (device,), partial(distributed.all_reduce, zeros))
    return {"size": size, "digest": digest_of(sums), "seconds": seconds}


def digest_of(sums: Any) -> str:
    """Return a digest that is equal for equal float32 numbers: the sign of zero is ignored."""
    return hashlib.sha256((sums.astype("float32") + 0.0).tobytes()).hexdigest()


def over_nodes(torch: Any, job: Job) -> tuple[list[Answer], list[Answer]]:
    """Return the node and GPU of each process, by rank, and the sums over them.

    Raises CheckFailure for a node that does not come.
    """
    distributed: Any = importlib.import_module("torch.distributed")
    meeting, patience = job["meeting"], timedelta(seconds=job.get("patience", MEET_SECONDS))
    rank, nodes = meeting["rank"], meeting["nodes"]
    if not job["rehearsal"]:
        torch.cuda.set_device(0)
    until = time.monotonic() + patience.total_seconds()
    try:
        place = meeting["address"], meeting["port"], len(nodes), rank == 0
        store = distributed.TCPStore(*place, timeout=patience, wait_for_workers=False)
    except RuntimeError as error:
        text = f"node {nodes[0]} cannot be reached at {place[0]}:{place[1]}: {error}"
        raise CheckFailure(text, outcome=table.INFRASTRUCTURE) from error
    # Others on this network may reach the store, but do not know the nonce.
    store = distributed.PrefixStore(job["nonce"], store)
    store.set(f"host-{rank}", json.dumps({"node": nodes[rank], "device": job["device"]}))
    hosts = []
    for number, name in enumerate(nodes):
        try:
            store.wait([f"host-{number}"], timedelta(seconds=max(1.0, until - time.monotonic())))
            hosts.append(json.loads(store.get(f"host-{number}")))
        except RuntimeError as error:
            text = f"node {name} did not come within {patience.total_seconds():.0f} s: {error}"
            raise CheckFailure(text, outcome=table.INFRASTRUCTURE) from error
    distributed.init_process_group(
        "gloo" if job["rehearsal"] else "nccl",
        store=store,
        rank=rank,
        world_size=len(nodes),
        timeout=timedelta(seconds=SUM_SECONDS),
    )
    sums = [pattern_sum(torch, distributed, job, rank, size) for size in job["sizes"]]
    distributed.barrier()
    leave(distributed, job)
    return hosts, sums


def pattern_sum(torch: Any, distributed: Any, job: Job, rank: int, size: int) -> Answer:
    device = device_of(torch, job, 0)
    total = torch.frombuffer(bytearray(pattern((rank,), size)), dtype=torch.float32).to(device)
    distributed.all_reduce(total)
    digest = hashlib.sha256(fetch(total, device).tobytes()).hexdigest()
    zeros = torch.zeros_like(total)
    _alive.extend((total, zeros))
    return {
        "size": size,
        "digest": digest,
        "seconds": timed(torch, (device,), partial(distributed.all_reduce, zeros)),
    }


def pattern(ranks: Iterable[int], size: int) -> bytes:
    """Return `size` bytes of float32: the sum over `ranks` of integers from 1 on, exact in any order."""
    rows = [[1.0 + (at * (rank + 1) + rank) % PERIOD for at in range(PERIOD)] for rank in ranks]
    whole = array.array("f", map(sum, zip(*rows)))  # noqa: B905 - Python 3.9
    return (whole.tobytes() * (size // (4 * PERIOD) + 1))[:size]


def pattern_digest(ranks: Iterable[int], size: int) -> str:
    return hashlib.sha256(pattern(ranks, size)).hexdigest()


def train(torch: Any, job: Job, rank: int) -> Answer:
    """Return losses and weights of gradient descent on this rank's part of the rows.

    All ranks except the first start with zero weights, so DistributedDataParallel must distribute the first
    rank's weights.
    """
    device, parts = device_of(torch, job, rank), job["ranks"]
    case = reference.make_training(job["rows"])
    inputs, targets = (
        torch.from_numpy(values[rank::parts].astype("float32")).to(device)
        for values in (case.inputs, case.targets)
    )
    layers = torch.nn.Linear(*case.first.shape, bias=False), torch.nn.Linear(*case.second.shape, bias=False)
    with torch.no_grad():
        for layer, weights in zip(layers, (case.first, case.second)):  # noqa: B905 - Python 3.9
            layer.weight.copy_(torch.from_numpy(weights.T.astype("float32")) * (rank == 0))
    network = torch.nn.Sequential(layers[0], torch.nn.Tanh(), layers[1]).to(device)
    if parts > 1:
        parallel = importlib.import_module("torch.nn.parallel").DistributedDataParallel
        network = parallel(network, device_ids=None if job["rehearsal"] else [rank])
    _alive.append(network)
    optimizer = torch.optim.SGD(network.parameters(), lr=reference.RATE)
    losses = []
    for step in range(reference.STEPS + 1):
        loss = torch.nn.functional.mse_loss(network(inputs), targets)
        losses.append(float(fetch(loss, device)))
        if step < reference.STEPS:
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    first, second = (fetch(layer.weight, device).T.tolist() for layer in layers)
    return {"losses": losses, "first": first, "second": second}
