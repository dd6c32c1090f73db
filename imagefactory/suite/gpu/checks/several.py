"""Check that all GPUs of the image copy to each other, sum, and train like a single GPU.

One process for each GPU computes (`ranks.py`). This file checks the results. `check_nodes` sums over
nodes, with a GPU of each: every node runs this suite, and its process meets those of the others.
"""

from __future__ import annotations

import glob
import importlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

from ...context import CheckFailure, Finding
from .. import ranks, reference, table, tolerances
from ..context import GpuContext, MeasuredFailure
from ..reference import ExpectedArray
from .driver import driver_outcomes, start
from .numbers import Ledger

SENT = 64 << 20
SIZES = (1 << 10, 1 << 20, 1 << 26)
REHEARSED_SIZES = SIZES[:2]
SEED = 60
ROWS = 512
# Fast network -> its directory in /sys/class, and its device nodes. Linux: drivers/infiniband/core (uverbs),
# HPE's cxi driver for Slingshot.
FABRICS = {"InfiniBand": ("infiniband", "infiniband/uverbs*"), "Slingshot": ("cxi", "cxi[0-9]*")}
# Texts of NCCL 2.4 to 2.28 (src/plugin/net.cc, transport/net_ib.cc) and of aws-ofi-nccl (nccl_ofi_rdma.cpp).
NETWORKS = (re.compile("Using network ([^\n]+)"), re.compile("Assigned NET plugin ([^\n]+) to comm"))
PROVIDER = re.compile("Selected [Pp]rovider is ([^ ,()]+)")
SLOW_PROVIDERS = ("tcp", "sockets", "udp", "net")
REASONS = {
    "NET/Plugin: Could not find": "no plug-in (libnccl-net.so) is in the image or bound into it",
    "No plugin found": "no plug-in (libnccl-net.so) is in the image or bound into it",
    "Failed to open libibverbs": "the image has no libibverbs",
    "NET/IB : No device found": "NCCL's own InfiniBand code found no device",
    "NCCL_IB_DISABLE set by environment to 1": "NCCL_IB_DISABLE is 1",
    "NCCL_NET set by environment to Socket": "NCCL_NET is Socket",
}
VARIABLES = ("NCCL_NET_PLUGIN", "FI_PROVIDER", "UCX_TLS", "UCX_NET_DEVICES")
# What task.sh tells each node of a job: its number, the names of all nodes, and where the first one listens.
MEETING = "IMAGEFACTORY_MEETING"
# Failures of an image on several nodes. Any other one may be that of a node or of the network between them.
OF_IMAGES = (table.WRONG_NUMBERS, table.NO_KERNEL, table.DRIVER_TOO_OLD)
MOST_PAIRS = 120
"""The number of pairs of sixteen GPUs. For more GPUs, a report contains only the slowest pair."""


def check_gpus(context: GpuContext) -> Finding:
    """Check that framework and driver count the same GPUs, at least two of one capability."""
    count = count_gpus(context)
    if context.rehearsal:
        return Finding(f"{count} processes replace GPUs (rehearsed on the CPU)", {"processes": count})
    with driver_outcomes():
        devices = start(context).devices()
    uuids = sorted({device.uuid for device in devices})
    capabilities = sorted({device.capability for device in devices})
    if len(uuids) != count or len(capabilities) != 1:
        text = f"torch counts {count} GPUs, the driver {len(uuids)} of capability {', '.join(capabilities)}"
        raise CheckFailure(text)
    return Finding(f"{count} of capability {capabilities[0]}: {', '.join(uuids)}", {"gpus": count})


def check_peer_to_peer(context: GpuContext) -> Finding:
    """Copy from each GPU to each other one, bit for bit.

    Without direct access, a copy goes through the host.
    """
    count = count_gpus(context)
    sent = SENT // 16 if context.rehearsal else SENT
    (answer,) = ranks.run_ranks({**job_of(context, "copies"), "gpus": count, "bytes": sent}, 1)
    return judge_copies(answer["copies"], sent, rehearsal=context.rehearsal)


def judge_copies(copies: Sequence[Mapping[str, Any]], sent: int, *, rehearsal: bool) -> Finding:
    """Return the rate of each pair: that of the slower of its two directions."""
    numbers: dict[str, float] = {"bytes": sent}
    wrong = [f"{copy['from']} to {copy['to']}" for copy in copies if not copy["exact"]]
    by_pair: dict[tuple[int, int], list[Mapping[str, Any]]] = {}
    for copy in copies:
        pair = min(copy["from"], copy["to"]), max(copy["from"], copy["to"])
        by_pair.setdefault(pair, []).append(copy)
    pairs = sorted(by_pair)
    direct = [pair for pair in pairs if all(copy["direct"] for copy in by_pair[pair])]
    rates = {} if rehearsal else {
        pair: sent / max(1e-9, *(copy["seconds"] for copy in by_pair[pair])) / 1e9 for pair in pairs
    }  # fmt: skip
    if len(pairs) <= MOST_PAIRS:
        for (start, end), rate in rates.items():
            numbers[f"{start}-{end}-gb-per-s"] = rate
            numbers[f"{start}-{end}-direct"] = float((start, end) in direct)
    elif rates:
        numbers["slowest-gb-per-s"] = min(rates.values())
    if wrong:
        text = f"what GPU {', '.join(wrong)} was sent is not what came"
        raise MeasuredFailure(text, outcome=table.WRONG_NUMBERS, numbers=numbers)
    if rehearsal:
        return Finding(f"{len(copies)} copies exact, of tensors of one CPU (rehearsed on the CPU)", numbers)
    how = f"{len(direct)} of {len(pairs)} pairs have direct access, {min(rates.values()):.1f} GB/s at least"
    return Finding(f"{sent >> 20} MiB from each to each, exact; {how}", numbers)


def check_all_reduce(context: GpuContext) -> Finding:
    """Sum integers, exact in float32 in any order. Every process must have the complete sum."""
    count = count_gpus(context)
    sizes = REHEARSED_SIZES if context.rehearsal else SIZES
    answers = ranks.run_ranks({**job_of(context, "all-reduce"), "sizes": sizes, "seed": SEED}, count)
    sums = [answer["sums"] for answer in answers]
    return judge_sums(sums, sizes, worker(context), rehearsal=context.rehearsal)


def judge_sums(
    sums: Sequence[Sequence[Mapping[str, Any]]], sizes: Sequence[int], worker: Any, *, rehearsal: bool
) -> Finding:
    """Check the sums, given by rank and size with the digest of the result."""
    numbers: dict[str, float] = {"processes": len(sums)}
    wrong = []
    for at, size in enumerate(sizes):
        parts = (reference.integers(SEED + rank, size // 4) for rank in range(len(sums)))
        expected = worker.digest_of(sum(parts))
        wrong += [
            f"{size} bytes in process {n}" for n, rank in enumerate(sums) if rank[at]["digest"] != expected
        ]
        if not rehearsal:
            numbers[f"all-reduce-{size}-s"] = max(rank[at]["seconds"] for rank in sums)
    if wrong:
        raise MeasuredFailure(f"wrong sums: {', '.join(wrong)}", outcome=table.WRONG_NUMBERS, numbers=numbers)
    place = "by gloo (rehearsed on the CPU)" if rehearsal else "by NCCL"
    return Finding(f"sums over {len(sums)} processes {place} are exact, up to {sizes[-1]} bytes", numbers)


def check_transport(context: GpuContext) -> Finding:
    """Read in NCCL's log which network it chose between nodes, and why not a faster one.

    On one machine NCCL opens its network too, but copies between GPUs without it.
    """
    answers = ranks.run_ranks(job_of(context, "transport"), count_gpus(context))
    if context.rehearsal:
        return Finding("gloo by the loopback device (rehearsed on the CPU)", {"processes": len(answers)})
    return judge_transport(answers[0]["log"], find_fabrics(), os.environ)


def find_fabrics(sys: str = "/sys/class", dev: str = "/dev") -> dict[str, tuple[list[str], list[str]]]:
    """Return the devices of each fast network that the kernel has, and their nodes in this container."""
    devices = {name: (glob.glob(f"{sys}/{kind}/*"), nodes) for name, (kind, nodes) in FABRICS.items()}
    return {
        name: (sorted(map(os.path.basename, paths)), sorted(glob.glob(f"{dev}/{nodes}")))
        for name, (paths, nodes) in devices.items()
        if paths
    }


def judge_transport(
    log: Sequence[str], fabrics: Mapping[str, tuple[list[str], list[str]]], environ: Mapping[str, str]
) -> Finding:
    """Return the network in a log of NCCL. Raises MeasuredFailure for sockets beside a faster network.

    It is only a fault if this container has nodes of the faster devices.
    """
    text = "\n".join(log)
    networks = [match[1].strip() for line in log for pattern in NETWORKS if (match := pattern.search(line))]
    if not networks:
        raise CheckFailure("NCCL's log names no network")
    providers = [match[1] for line in log if (match := PROVIDER.search(line))]
    network, provider = networks[-1], providers[-1] if providers else ""
    slow = network.lower() == "socket" or provider.partition(";")[0] in SLOW_PROVIDERS
    network += f" ({provider})" if provider else ""
    reasons = [reason for mark, reason in REASONS.items() if mark in text]
    reasons += [f"{name}={environ[name][:100]}" for name in VARIABLES if environ.get(name)]
    usable = [name for name, (_, nodes) in fabrics.items() if nodes]
    closed = [f"no device node of {name} is in this container" for name in fabrics if name not in usable]
    numbers = {"sockets": float(slow), **{f"{name}-devices": len(row[0]) for name, row in fabrics.items()}}
    why = f": {'; '.join([*reasons, *closed])}" if slow and (reasons or closed) else ""
    if slow and usable:
        faster = ", ".join(f"{name} ({', '.join(fabrics[name][0][:4])})" for name in usable)
        detail = f"NCCL uses {network} between nodes, not {faster}{why}"
        raise MeasuredFailure(detail, outcome=table.LOAD_FAILED, numbers=numbers)
    return Finding(f"NCCL uses {network} between nodes{why}", numbers)


def check_nodes(context: GpuContext) -> Finding:
    """Sum integers over a GPU of each node, by the host's network, and read which network NCCL used.

    Every node must have the complete sum. Raises CheckFailure with the outcome `infrastructure` if a node
    does not come, or if the processes lose each other: this is not the image's fault.
    """
    if MEETING not in os.environ:
        raise CheckFailure("this job has no other nodes", outcome=table.INFRASTRUCTURE)
    sizes = REHEARSED_SIZES if context.rehearsal else SIZES
    job = {**job_of(context, "nodes"), "sizes": sizes, "device": dict(context.device)}
    job.update(meeting=json.loads(os.environ[MEETING]), nonce=context.request.expected.nonce)
    try:
        (answer,) = ranks.run_ranks(job, 1)
    except CheckFailure as failure:
        outcome = failure.outcome if failure.outcome in OF_IMAGES else table.INFRASTRUCTURE
        raise CheckFailure(failure.detail, outcome=outcome) from failure
    return judge_nodes(answer, find_fabrics(), os.environ, worker(context), rehearsal=context.rehearsal)


def judge_nodes(
    answer: Mapping[str, Any],
    fabrics: Mapping[str, tuple[list[str], list[str]]],
    environ: Mapping[str, str],
    worker: Any,
    *,
    rehearsal: bool,
) -> Finding:
    """Return the finding of one node: `hosts` have the GPU of each node, `sums` a digest for each size."""
    hosts, numbers = answer["hosts"], {"nodes": float(len(answer["hosts"]))}
    capabilities = sorted({host["device"].get("capability", "") for host in hosts})
    if len(capabilities) != 1:
        text = f"the nodes have GPUs of capability {', '.join(capabilities)}"
        raise CheckFailure(text, outcome=table.WRONG_GPU)
    if not rehearsal and len({host["device"]["uuid"] for host in hosts}) != len(hosts):
        raise CheckFailure("two nodes used the same GPU", outcome=table.INFRASTRUCTURE)
    wrong = []
    for row in answer["sums"]:
        if row["digest"] != worker.pattern_digest(range(len(hosts)), row["size"]):
            wrong.append(f"{row['size']} bytes")
        elif not rehearsal:
            numbers[f"all-reduce-{row['size']}-s"] = row["seconds"]
    names = ", ".join(f"{host['node']} ({host['device'].get('uuid', 'CPU')})" for host in hosts)
    if wrong:
        text = f"wrong sums over {names}: {', '.join(wrong)}"
        raise MeasuredFailure(text, outcome=table.WRONG_NUMBERS, numbers=numbers)
    summary = f"sums over {names} are exact, up to {answer['sums'][-1]['size']} bytes"
    if rehearsal:
        return Finding(f"{summary}, by gloo (rehearsed on the CPU)", numbers)
    network = judge_transport(answer["log"], fabrics, environ)
    return Finding(f"{summary}; {network.detail}", {**numbers, **network.numbers})


def check_data_parallel(context: GpuContext) -> Finding:
    """Train with DistributedDataParallel on all GPUs, and on a single GPU with all rows."""
    count = count_gpus(context)
    job = {**job_of(context, "train"), "rows": ROWS // count * count}
    (alone,) = ranks.run_ranks(job, 1)
    together = ranks.run_ranks(job, count)
    ledger, numpy = Ledger(context), reference.numpy
    bound = tolerances.data_parallel(reference.STEPS, job["rows"])
    losses = numpy.mean([answer["losses"] for answer in together], axis=0)
    ledger.compare("losses", losses, ExpectedArray(numpy.array(alone["losses"]), alone["losses"][0]), bound)
    for name in ("first", "second"):
        weights = numpy.array(alone[name])
        expected = ExpectedArray(weights, abs(weights).max())
        errors = [reference.error(numpy.array(answer[name]), expected) for answer in together]
        ledger.note(f"{name}-weights", max(errors), bound)
    before, after = losses[0], losses[-1]
    ledger.numbers.update({"loss-before": before, "loss-after": after})
    if not after < before / 2:
        ledger.wrong.append(f"the loss goes from {before:.4g} to {after:.4g}")
    return ledger.finding(f"{reference.STEPS} steps on {count} give what they give on one")


def worker(context: GpuContext) -> Any:
    """Return the file of frameworks/ that the processes run."""
    name = context.request.expected.framework
    return importlib.import_module(f"..frameworks.{name}_ranks", __package__)


def job_of(context: GpuContext, what: str) -> dict[str, Any]:
    return {"framework": context.request.expected.framework, "what": what, "rehearsal": context.rehearsal}


def count_gpus(context: GpuContext) -> int:
    """Return the number of GPUs that the framework sees. Raises CheckFailure for fewer than two."""
    count: int = worker(context).count(context)
    if count < 2:
        raise CheckFailure(f"several GPUs were asked for, this job sees {count}", outcome=table.WRONG_GPU)
    return count
