"""The checks of several GPUs: what processes say, judged. Their answers are made up, or computed by numpy."""

from __future__ import annotations

import itertools
import json
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from imagefactory.suite.context import CheckFailure
from imagefactory.suite.gpu import ranks, reference, table
from imagefactory.suite.gpu.checks import several
from imagefactory.suite.gpu.context import GpuContext, MeasuredFailure, parse_request
from imagefactory.suite.gpu.frameworks import torch_ranks
from imagefactory.suite.gpu.suite import environment_of
from imagefactory.verify.outcome import MOST_NUMBERS
from tests.made.gpu_suite import make_expectations

A, B, C = (f"GPU-{letter * 8}-0000-0000-0000-000000000000" for letter in "abc")
NUMPY: Any = reference.numpy


def make_context(**changes: Any) -> GpuContext:
    asked = parse_request(json.dumps(make_expectations(level="several", **changes)))
    return GpuContext(request=asked, framework=torch_ranks, site="", prefix="", device={"capability": "8.0"})


# --- for whom, and which GPUs --------------------------------------------------------------------


@pytest.mark.parametrize("check", table.PARTS["several"])
def test_the_part_is_pytorchs_on_nvidias_gpus(check: str) -> None:
    assert table.not_applicable("torch", check, {"torch": "2.3.1"}) == ""
    assert "only PyTorch" in table.not_applicable("jax", check, {"jax": "0.4"})
    assert "RCCL" in table.not_applicable("torch", check, {"torch": "2.9.1+rocm6.4"})
    assert "no framework" in table.not_applicable("other", check, {})
    assert table.checks_of("several") == (*table.PARTS["driver"], *table.PARTS["several"])


def test_it_sees_all_that_are_like_the_one_that_was_found() -> None:
    facts = {"device": {"uuid": A, "capability": "8.0"}, "visible": 3, "alike": [A, C]}
    asked = make_context().request
    assert environment_of("several", asked, facts, {})["CUDA_VISIBLE_DEVICES"] == f"{A},{C}"
    assert environment_of("numbers", asked, facts, {})["CUDA_VISIBLE_DEVICES"] == A
    rehearsal = replace(asked, rehearsal=True)
    assert environment_of("several", rehearsal, facts, {})["CUDA_VISIBLE_DEVICES"] == "-1"


@dataclass(frozen=True)
class Met:
    uuid: str
    capability: str = "8.0"


@pytest.mark.parametrize(
    ("counted", "met", "outcome"),
    [
        (2, [Met(A), Met(B)], ""),
        (1, [Met(A)], "wrong-gpu"),
        (2, [Met(A)], "load-failed"),
        (2, [Met(A), Met(A)], "load-failed"),
        (2, [Met(A), Met(B, "9.0")], "load-failed"),
    ],
)
def test_framework_and_driver_count_the_same_gpus(
    monkeypatch: pytest.MonkeyPatch, counted: int, met: list[Met], outcome: str
) -> None:
    class Library:
        def devices(self) -> list[Met]:
            return met

    monkeypatch.setattr(torch_ranks, "count", lambda context: counted)
    monkeypatch.setattr(several, "start", lambda context: Library())
    if not outcome:
        finding = several.check_gpus(make_context())
        assert finding.numbers == {"gpus": 2}
        assert finding.detail == f"2 of capability 8.0: {A}, {B}"
        return
    with pytest.raises(CheckFailure) as caught:
        several.check_gpus(make_context())
    assert caught.value.outcome == outcome


def test_a_rehearsal_counts_no_gpu() -> None:
    finding = several.check_gpus(make_context(rehearsal=True))
    assert "rehearsed" in finding.detail
    assert "gpus" not in finding.numbers


# --- from one to another -------------------------------------------------------------------------


def copies(gpus: int, **changes: Any) -> list[dict[str, Any]]:
    good = {"exact": True, "direct": True, "seconds": 0.01}
    return [{"from": a, "to": b, **good, **changes} for a, b in itertools.permutations(range(gpus), 2)]


def test_each_pair_counts_by_its_slower_way() -> None:
    said = copies(2)
    said[1].update(seconds=0.02, direct=False)
    finding = several.judge_copies(said, 10**9, rehearsal=False)
    assert finding.numbers == {"bytes": 10**9, "0-1-gb-per-s": pytest.approx(50), "0-1-direct": 0.0}
    assert "0 of 1" in finding.detail
    assert several.judge_copies(copies(2), 10**9, rehearsal=False).numbers["0-1-direct"] == 1.0


def test_wrong_bytes_are_a_failure_and_the_host_between_is_none() -> None:
    assert several.judge_copies(copies(3, direct=False), 1 << 20, rehearsal=False)
    said = copies(3)
    said[-1]["exact"] = False
    with pytest.raises(MeasuredFailure, match="GPU 2 to 1") as caught:
        several.judge_copies(said, 1 << 20, rehearsal=False)
    assert caught.value.outcome == "wrong-numbers"
    assert "0-1-gb-per-s" in caught.value.numbers


@pytest.mark.parametrize("gpus", [16, 17, 40])
def test_a_report_has_room_for_what_many_gpus_say(gpus: int) -> None:
    numbers = several.judge_copies(copies(gpus), 1 << 20, rehearsal=False).numbers
    assert len(numbers) <= MOST_NUMBERS
    assert ("slowest-gb-per-s" in numbers) is (gpus > 16)


def test_a_rehearsal_has_no_rates() -> None:
    finding = several.judge_copies(copies(2), 1 << 20, rehearsal=True)
    assert finding.numbers == {"bytes": 1 << 20}
    assert "rehearsed" in finding.detail


# --- sums ----------------------------------------------------------------------------------------

SIZES = (64, 4096)


def sums(count: int, wrong: tuple[int, int] | None = None) -> list[list[dict[str, Any]]]:
    """What `count` processes have; that of `wrong` (rank, size) is off by one in one place."""
    said = []
    for rank, size in itertools.product(range(count), SIZES):
        total = sum(reference.integers(several.SEED + each, size // 4) for each in range(count))
        if wrong == (rank, size):
            total[-1] += 1
        row = {"size": size, "digest": torch_ranks.digest_of(total), "seconds": 0.001 * (rank + 1)}
        said.append(row)
    return [said[at : at + len(SIZES)] for at in range(0, len(said), len(SIZES))]


def test_all_must_have_the_exact_sum() -> None:
    finding = several.judge_sums(sums(3), SIZES, torch_ranks, rehearsal=False)
    assert finding.numbers == {"processes": 3, "all-reduce-64-s": 0.003, "all-reduce-4096-s": 0.003}
    assert several.judge_sums(sums(2), SIZES, torch_ranks, rehearsal=True).numbers == {"processes": 2}
    with pytest.raises(MeasuredFailure, match=r" 4096 .* 1$") as caught:
        several.judge_sums(sums(3, wrong=(1, 4096)), SIZES, torch_ranks, rehearsal=False)
    assert caught.value.outcome == "wrong-numbers"


def test_a_zero_has_no_sign() -> None:
    assert torch_ranks.digest_of(NUMPY.array([-0.0])) == torch_ranks.digest_of(NUMPY.array([0.0]))


# --- a network on all of them --------------------------------------------------------------------


def trained(rows: int, parts: int = 1, rank: int = 0) -> dict[str, Any]:
    """By numpy, on the rows of a rank alone: what a process says that shares no gradients."""
    case = reference.make_training(rows)
    own = replace(case, inputs=case.inputs[rank::parts], targets=case.targets[rank::parts])
    losses, first, second = reference.training(own)
    return {"losses": losses, "first": first.tolist(), "second": second.tolist()}


@pytest.mark.parametrize("count", [2, 3, 7])
def test_several_train_as_one(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    jobs: list[tuple[int, int]] = []

    def fake(job: dict[str, Any], number: int) -> list[dict[str, Any]]:
        jobs.append((job["rows"], number))
        return [trained(job["rows"])] * number

    monkeypatch.setattr(torch_ranks, "count", lambda context: count)
    monkeypatch.setattr(ranks, "run_ranks", fake)
    finding = several.check_data_parallel(make_context())
    assert {rows % count for rows, _ in jobs} == {0}
    assert [number for _, number in jobs] == [1, count]
    assert finding.numbers["loss-after"] < finding.numbers["loss-before"] / 2
    assert finding.numbers["first-weights-error"] == 0.0


@pytest.mark.parametrize("wrong", ["gradients", "weights", "loss", "nan"])
def test_what_does_not_train_as_one_is_seen(monkeypatch: pytest.MonkeyPatch, wrong: str) -> None:
    def fake(job: dict[str, Any], number: int) -> list[dict[str, Any]]:
        said = [trained(job["rows"]) for _ in range(number)]
        if number > 1 and wrong == "gradients":  # each steps by its own rows
            return [trained(job["rows"], number, rank) for rank in range(number)]
        if number > 1 and wrong == "weights":
            said[1]["second"][0][0] += 0.01
        if number > 1 and wrong == "nan":
            said[1]["first"][0][0] = float("nan")
        if wrong == "loss":  # one and several agree, and neither learns
            said = [{**one, "losses": one["losses"][:1] * len(one["losses"])} for one in said]
        return said

    monkeypatch.setattr(torch_ranks, "count", lambda context: 2)
    monkeypatch.setattr(ranks, "run_ranks", fake)
    with pytest.raises(MeasuredFailure) as caught:
        several.check_data_parallel(make_context())
    assert caught.value.outcome == "wrong-numbers"


# --- the network between nodes --------------------------------------------------------------------

SOCKETS = (
    "INFO NET/Plugin: Could not find: libnccl-net.so. Using internal network plugin.",
    "INFO Failed to open libibverbs.so[.1]",
    "INFO NET/Socket : Using [0]lo:127.0.0.1<0>",
    "INFO Using network Socket",
)
OWN = ("INFO NET/IB : Using [0]mlx5_0:1/IB [RO]; OOB lo:127.0.0.1<0>", "INFO Assigned NET plugin IB to comm")
LIBFABRIC = (
    "INFO NET/OFI Initializing aws-ofi-nccl 1.16.2",
    "INFO NET/OFI Selected provider is {}, fabric is {}",
    "INFO Using network Libfabric",
)
FAST = {"InfiniBand": (["mlx5_0"], ["/dev/infiniband/uverbs0"])}
CLOSED = {"Slingshot": (["cxi0"], [])}


@pytest.mark.parametrize(
    ("log", "fabrics", "network"),
    [
        (SOCKETS, {}, "Socket"),
        (SOCKETS, CLOSED, "Socket"),
        (OWN, FAST, "IB"),
        (tuple(line.format("cxi", "cxi") for line in LIBFABRIC), CLOSED | FAST, "Libfabric (cxi)"),
    ],
)
def test_the_network_is_the_one_of_the_log(log: tuple[str, ...], fabrics: Any, network: str) -> None:
    finding = several.judge_transport(log, fabrics, {})
    assert finding.detail.startswith(f"NCCL uses {network} between nodes")
    assert ("Slingshot" in finding.detail) == (log == SOCKETS and bool(fabrics))
    assert finding.numbers["sockets"] == float(log == SOCKETS)


@pytest.mark.parametrize(
    ("log", "reasons"),
    [
        (SOCKETS, ("libnccl-net.so", "libibverbs", "FI_PROVIDER=tcp")),
        (("INFO NCCL_IB_DISABLE set by environment to 1.", SOCKETS[-1]), ("NCCL_IB_DISABLE is 1",)),
        (tuple(line.format("tcp;ofi_rxm", "eth0") for line in LIBFABRIC), ("Libfabric (tcp;ofi_rxm)",)),
    ],
)
def test_sockets_beside_a_faster_network_are_a_fault(log: tuple[str, ...], reasons: tuple[str, ...]) -> None:
    with pytest.raises(MeasuredFailure) as error:
        several.judge_transport(log, FAST, {"FI_PROVIDER": "tcp"})
    assert error.value.outcome == table.LOAD_FAILED
    assert error.value.numbers == {"sockets": 1.0, "InfiniBand-devices": 1}
    assert all(reason in error.value.detail for reason in (*reasons, "mlx5_0"))


def test_a_log_without_a_network_is_not_a_pass() -> None:
    with pytest.raises(CheckFailure):
        several.judge_transport(SOCKETS[:2], {}, {})


def test_devices_are_those_of_the_kernel_and_nodes_those_of_the_container(tmp_path: Path) -> None:
    for name in ("sys/infiniband/mlx5_0", "sys/infiniband/mlx5_1", "dev/infiniband"):
        (tmp_path / name).mkdir(parents=True)
    for name in ("uverbs0", "rdma_cm"):
        (tmp_path / "dev/infiniband" / name).touch()
    found = several.find_fabrics(str(tmp_path / "sys"), str(tmp_path / "dev"))
    assert found == {"InfiniBand": (["mlx5_0", "mlx5_1"], [str(tmp_path / "dev/infiniband/uverbs0")])}


def test_the_log_of_a_rank_is_read_by_its_marks(tmp_path: Path) -> None:
    path = tmp_path / "nccl-0.log"
    assert torch_ranks.read_log(str(path)) == []
    path.write_text(
        f"n1:7:7 [0] NCCL {SOCKETS[0]}\nn1:7:7 [0] NCCL INFO Channel 00/02 : 0 1\nno line of it\n"
    )
    assert torch_ranks.read_log(str(path)) == [SOCKETS[0]]


# --- a GPU of each of two nodes ------------------------------------------------------------------

MEETING = {"rank": 0, "nodes": ["h1", "h2"], "address": "127.0.0.1", "port": 1}


def nodes_context(**changes: Any) -> GpuContext:
    return replace(
        make_context(),
        request=parse_request(json.dumps(make_expectations(level="nodes", **changes))),
        device={"capability": "8.0", "uuid": A},
    )


def answer_of(*digests: str, uuids: tuple[str, str] = (A, B), other: str = "8.0") -> dict[str, Any]:
    capabilities = ("8.0", other)
    hosts = [
        {"node": name, "device": {"uuid": uuid, "capability": capability}}
        for name, uuid, capability in zip(MEETING["nodes"], uuids, capabilities, strict=True)  # type: ignore[call-overload]
    ]
    sums = [
        {"size": size, "digest": digest, "seconds": 0.5}
        for size, digest in zip(several.SIZES[:2], digests, strict=True)
    ]
    return {"hosts": hosts, "sums": sums, "log": ["Using network Socket"]}


RIGHT = tuple(torch_ranks.pattern_digest(range(2), size) for size in several.SIZES[:2])


def judge(answer: dict[str, Any], fabrics: Any = {}) -> Any:  # noqa: B006 - never changed
    return several.judge_nodes(answer, fabrics, {}, torch_ranks, rehearsal=False)


def test_the_sum_over_nodes_names_each_gpu() -> None:
    assert RIGHT[0] != torch_ranks.pattern_digest((0,), several.SIZES[0])
    finding = judge(answer_of(*RIGHT))
    assert f"h1 ({A}), h2 ({B})" in finding.detail
    assert (finding.numbers["nodes"], finding.numbers["sockets"]) == (2, 1)
    assert finding.numbers["all-reduce-1024-s"] == 0.5


@pytest.mark.parametrize(
    ("answer", "fabrics", "outcome"),
    [
        (answer_of(RIGHT[0], RIGHT[0]), {}, "wrong-numbers"),
        (answer_of(*RIGHT, uuids=(A, A)), {}, "infrastructure"),
        (answer_of(*RIGHT, other="9.0"), {}, "wrong-gpu"),
        (answer_of(*RIGHT), {"InfiniBand": (["mlx5_0"], ["/dev/infiniband/uverbs0"])}, "load-failed"),
    ],
)
def test_nodes_that_do_not_sum_as_one(answer: dict[str, Any], fabrics: Any, outcome: str) -> None:
    with pytest.raises(CheckFailure) as caught:
        judge(answer, fabrics)
    assert caught.value.outcome == outcome


@pytest.mark.parametrize(
    ("outcome", "becomes"),
    [
        ("load-failed", "infrastructure"),
        ("timeout", "infrastructure"),
        ("infrastructure", "infrastructure"),
        ("no-kernel", "no-kernel"),
        ("driver-too-old", "driver-too-old"),
    ],
)
def test_a_node_that_is_lost_is_not_the_images_fault(
    monkeypatch: pytest.MonkeyPatch, outcome: str, becomes: str
) -> None:
    def lose(job: Any, count: int) -> Any:
        assert (job["meeting"], count) == (MEETING, 1)
        raise CheckFailure("Connection closed by peer", outcome=outcome)

    monkeypatch.setattr(ranks, "run_ranks", lose)
    monkeypatch.setenv(several.MEETING, json.dumps(MEETING))
    with pytest.raises(CheckFailure) as caught:
        several.check_nodes(nodes_context())
    assert caught.value.outcome == becomes
    monkeypatch.delenv(several.MEETING)
    with pytest.raises(CheckFailure) as caught:
        several.check_nodes(nodes_context())
    assert caught.value.outcome == "infrastructure"


class Store:
    """A store to which the second node never comes."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}

    def set(self, name: str, value: str) -> None:
        self.values[name] = value

    def get(self, name: str) -> str:
        return self.values[name]

    def wait(self, names: list[str], _: Any) -> None:
        if names[0] not in self.values:
            raise RuntimeError("Socket Timeout")


@pytest.mark.parametrize(("reached", "name"), [(True, "h2"), (False, "h1")])
def test_a_node_that_does_not_come_is_named(
    monkeypatch: pytest.MonkeyPatch, reached: bool, name: str
) -> None:
    def connect(*_: Any, **__: Any) -> Store:
        if not reached:
            raise RuntimeError("connection refused")
        return Store()

    distributed = SimpleNamespace(TCPStore=connect, PrefixStore=lambda _, store: store)
    monkeypatch.setitem(sys.modules, "torch.distributed", distributed)  # type: ignore[arg-type]
    job = {"meeting": MEETING, "rehearsal": True, "nonce": "5eed", "device": {}, "sizes": ()}
    with pytest.raises(CheckFailure) as caught:
        torch_ranks.over_nodes(None, job)
    assert caught.value.outcome == "infrastructure"
    assert f"node {name} " in caught.value.detail
