"""Emulate several processes, each with one GPU. Collectives take time, and wait for the slowest process.

torch.distributed is real for host tensors, with the backend gloo. Collectives on emulated GPUs move no bytes:
the processes exchange their arrival times, and continue at the latest one plus the transfer time.
"""

from __future__ import annotations

import importlib
from typing import Any

from .machine import Machine
from .roofline import exchanging

# How many times its bytes each GPU sends; in a ring of n, (n - 1) / n of this.
ROUNDS = {"allreduce": 2.0, "allgather": 1.0, "reduce_scatter": 1.0, "broadcast": 1.0, "reduce": 1.0}


class Ranks:
    """The processes of a run after `meet`. Their clocks started at different times."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._group: Any = None
        self._offset = 0.0
        self.count = 1

    def meet(self) -> None:
        """Create the group, and align the clocks."""
        distributed = importlib.import_module("torch.distributed")
        self.count = distributed.get_world_size()
        self._group = distributed.new_group(backend="gloo")
        self._latest(0.0)
        self._offset = self._latest(self._machine.clock.host()) - self._machine.clock.host()

    def collective(self, name: str, index: int, moved: float) -> None:
        """Queue a collective on a device. It starts when the last process arrives."""
        machine, clock = self._machine, self._machine.clocks[index]
        if self._group is None:
            return
        stream = machine.streams[index]
        start_time = max(clock.host(), clock.streams.get(stream, 0.0))
        clock.hold(stream, self._latest(start_time + self._offset) - self._offset)
        share = next((share for word, share in ROUNDS.items() if word in name), 1.0)
        machine.operations += 1
        clock.charge(stream, exchanging(machine.profile, share * moved * (self.count - 1) / self.count))

    def answer(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Return the result that torch expects. Older versions require data, so one number is sent."""
        torch = self._machine.torch
        if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "Meta"):
            return func(*args, **kwargs)
        small = func(*(self._small(argument) for argument in args), **kwargs)
        return (args[0], small[1]) if isinstance(small, tuple) else small

    def _small(self, argument: Any) -> Any:
        if isinstance(argument, self._machine.torch.Tensor):
            return self._machine.torch.zeros(1, dtype=argument.dtype, device="cpu")
        if isinstance(argument, list | tuple):
            return type(argument)(self._small(item) for item in argument)
        return argument

    def _latest(self, time: float) -> float:
        """Return the latest time of all processes."""
        torch = self._machine.torch
        latest = torch.tensor([time], dtype=torch.float64, device="cpu")
        distributed = importlib.import_module("torch.distributed")
        distributed.all_reduce(latest, op=distributed.ReduceOp.MAX, group=self._group)
        return float(latest)


def install(machine: Machine) -> Ranks:
    """Make `init_process_group("nccl")` and DistributedDataParallel work."""
    ranks = Ranks(machine)
    distributed = importlib.import_module("torch.distributed")
    if not distributed.is_available():
        return ranks
    core = importlib.import_module("torch.distributed.distributed_c10d")
    begin, get_backend = core.init_process_group, core.get_backend

    def start(backend: Any = None, *args: Any, **kwargs: Any) -> None:
        kwargs.pop("device_id", None)
        kwargs.pop("pg_options", None)
        begin("gloo" if backend is None or "nccl" in str(backend) else backend, *args, **kwargs)
        with machine.apart():
            ranks.meet()

    def backend_of(group: Any = None) -> Any:
        return "nccl" if get_backend(group) == "gloo" else get_backend(group)

    def together(group: Any = None, async_op: bool = False, device_ids: Any = None) -> Any:
        machine.clock.synchronize()
        return meet(group, async_op)

    meet = core.barrier
    instead = {
        "init_process_group": start,
        "get_backend": backend_of,
        "barrier": together,
        "is_nccl_available": lambda: True,
        "_verify_params_across_processes": lambda *_args, **_kwargs: None,
    }
    for module in (core, distributed):
        for name, answer in instead.items():
            setattr(module, name, answer)
    _buckets(machine, ranks)
    return ranks


def _buckets(machine: Machine, ranks: Ranks) -> None:
    """Replace the gradient exchange of DistributedDataParallel, which bypasses the dispatch mode."""
    parallel = importlib.import_module("torch.nn.parallel.distributed")
    kind = parallel.DistributedDataParallel
    initialize, register = kind.__init__, kind.register_comm_hook
    future = importlib.import_module("torch.futures").Future

    def exchange(_state: Any, bucket: Any) -> Any:
        gradients = bucket.buffer()
        with machine.apart():
            ranks.collective("allreduce", machine.current, gradients.numel() * gradients.element_size())
        result = future()
        result.set_result(gradients)
        return result

    exchange.__annotations__ = {}  # torch accepts no others than its own

    def make(self: Any, *args: Any, **kwargs: Any) -> None:
        initialize(self, *args, **kwargs)
        if any(machine.find(parameter) is not None for parameter in self.module.parameters()):
            register(self, None, exchange)
            self.register_comm_hook = lambda *_args, **_kwargs: None

    kind.__init__ = make
