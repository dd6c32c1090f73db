"""Replace torch.cuda, other functions that query torch for an accelerator, and mixed precision.

torch casts only tensors of a real GPU, so `install_autocast` casts tensors of an emulated device. Source for
the precision of each operation: PyTorch documentation, Automatic Mixed Precision package, "CUDA Ops that can
autocast".
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

from .machine import Machine, Memory


def install(machine: Machine) -> None:
    """Replace the functions of torch.cuda, which require a driver."""
    cuda = machine.torch.cuda
    for name, answer in {
        **_devices(machine),
        **_memory(machine),
        **_random(machine),
        **_streams(machine),
    }.items():
        setattr(cuda, name, answer)
    for module, names in ((cuda.memory, _memory(machine)), (cuda.random, _random(machine))):
        for name, answer in names.items():
            setattr(module, name, answer)
    _around(machine)


def _index(machine: Machine, device: Any = None) -> int:
    """Return the index of a device as torch.cuda accepts it: None, a number, a name or a device."""
    if device is None:
        return machine.current
    if isinstance(device, int):
        index = device if device >= 0 else machine.current
    else:
        number = machine.torch.device(device).index if not hasattr(device, "idx") else device.idx
        index = machine.current if number is None else number
    if index >= machine.count:
        raise RuntimeError(
            f"CUDA error: invalid device ordinal {index}: this program has {machine.count} GPUs"
        )
    return int(index)


def _devices(machine: Machine) -> dict[str, Any]:
    torch, profile = machine.torch, machine.profile
    major, minor = profile.capability

    def properties(device: Any = None) -> Any:
        _index(machine, device)
        return types.SimpleNamespace(
            name=profile.device,
            major=major,
            minor=minor,
            total_memory=profile.memory,
            multi_processor_count=profile.processors,
            is_integrated=0,
            is_multi_gpu_board=0,
            warp_size=32,
            max_threads_per_multi_processor=2048
            if (major, minor) in ((7, 0), (8, 0), (9, 0), (10, 0))
            else 1536,
            regs_per_multiprocessor=65536,
            shared_memory_per_block=49152,
            L2_cache_size=0,
            gcnArchName="",
            uuid="00000000-0000-0000-0000-000000000000",
        )

    def set_device(device: Any) -> None:
        machine.current = _index(machine, device)

    def exchange(index: int) -> int:
        before = machine.current
        if index >= 0:
            machine.current = _index(machine, index)
        return before

    def synchronize(device: Any = None) -> None:
        machine.clocks[_index(machine, device)].synchronize()

    return {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "init": lambda: None,
        "_lazy_init": lambda: None,
        "_lazy_call": lambda call, **_: call(),
        "_is_in_bad_fork": lambda: False,
        "device_count": lambda: machine.count,
        "current_device": lambda: machine.current,
        "set_device": set_device,
        "_exchange_device": exchange,
        "_maybe_exchange_device": exchange,
        "synchronize": synchronize,
        "get_device_name": lambda device=None: properties(device).name,
        "get_device_capability": lambda device=None: properties(device) and (major, minor),
        "get_device_properties": properties,
        "is_bf16_supported": lambda including_emulation=True: major >= 8 or including_emulation,
        "is_tf32_supported": lambda: major >= 8,
        "get_arch_list": lambda: [f"sm_{major}{minor}"],
        "get_gencode_flags": lambda: "",
        "can_device_access_peer": lambda *_: True,
        "utilization": lambda device=None: 0,
        "is_current_stream_capturing": lambda: False,
        "ipc_collect": lambda: None,
        "get_sync_debug_mode": lambda: 0,
        "set_sync_debug_mode": lambda mode: None,
        "cudart": lambda: types.SimpleNamespace(cudaProfilerStart=lambda: 0, cudaProfilerStop=lambda: 0),
        "OutOfMemoryError": getattr(torch.cuda, "OutOfMemoryError", RuntimeError),
    }


def _memory(machine: Machine) -> dict[str, Any]:
    def of(answer: Callable[[Memory], Any]) -> Callable[..., Any]:
        return lambda device=None, *_: answer(machine.memories[_index(machine, device)])

    def stats(memory: Memory) -> dict[str, int]:
        return {
            "allocated_bytes.all.current": memory.allocated,
            "allocated_bytes.all.peak": memory.most,
            "reserved_bytes.all.current": memory.reserved,
            "reserved_bytes.all.peak": memory.most_reserved,
            "active_bytes.all.current": memory.allocated,
            "active_bytes.all.peak": memory.most,
            "allocation.all.current": memory.blocks,
            "num_alloc_retries": 0,
            "num_ooms": int(machine.out_of_memory),
        }

    def share(fraction: float, device: Any = None) -> None:
        machine.memories[_index(machine, device)].share = fraction

    def empty_cache() -> None:
        for memory in machine.memories:
            memory.empty_cache()

    return {
        "memory_allocated": of(lambda memory: memory.allocated),
        "max_memory_allocated": of(lambda memory: memory.most),
        "memory_reserved": of(lambda memory: memory.reserved),
        "max_memory_reserved": of(lambda memory: memory.most_reserved),
        "memory_cached": of(lambda memory: memory.reserved),
        "max_memory_cached": of(lambda memory: memory.most_reserved),
        "reset_peak_memory_stats": of(Memory.reset_peak),
        "reset_max_memory_allocated": of(Memory.reset_peak),
        "reset_max_memory_cached": of(Memory.reset_peak),
        "reset_accumulated_memory_stats": of(lambda memory: None),
        "memory_stats": of(stats),
        "memory_summary": of(
            lambda memory: f"emulated: {memory.allocated} bytes allocated, {memory.most} at most"
        ),
        "mem_get_info": of(lambda memory: (memory.total - memory.context - memory.reserved, memory.total)),
        "set_per_process_memory_fraction": share,
        "empty_cache": empty_cache,
    }


def _random(machine: Machine) -> dict[str, Any]:
    """Return functions that store and return a seed. They draw no random numbers."""
    torch = machine.torch
    host = torch.get_rng_state
    seeds = [0] * machine.count

    def seed(value: int) -> None:
        seeds[machine.current] = int(value)

    def seed_all(value: int) -> None:
        seeds[:] = [int(value)] * machine.count

    return {
        "manual_seed": seed,
        "manual_seed_all": seed_all,
        "seed": lambda: None,
        "seed_all": lambda: None,
        "initial_seed": lambda: seeds[machine.current],
        "get_rng_state": lambda device="cuda": host(),
        "get_rng_state_all": lambda: [host() for _ in range(machine.count)],
        "set_rng_state": lambda state, device="cuda": None,
        "set_rng_state_all": lambda states: None,
    }


def _streams(machine: Machine) -> dict[str, Any]:
    torch = machine.torch
    numbers = iter(range(1, 1 << 62))
    stream_base, event_base = _abstract("_StreamBase"), _abstract("_EventBase")

    class Stream(stream_base):  # type: ignore[misc,valid-type]
        """A stream: its operations run in order, and in parallel with other streams."""

        def __init__(
            self, device: Any = None, priority: int = 0, number: int | None = None, **_: Any
        ) -> None:
            self.device_index, self.priority = _index(machine, device), priority
            self.stream_id = next(numbers) if number is None else number
            self.device = torch.device("cuda", self.device_index)
            self.cuda_stream = self.stream_id
            self._clock = machine.clocks[self.device_index]

        def through(self) -> float:
            return float(self._clock.streams.get(self.stream_id, 0.0))

        def synchronize(self) -> None:
            self._clock.wait_until(self.through())

        def is_capturing(self) -> bool:
            return False

        def query(self) -> bool:
            return self.through() <= self._clock.host()

        def wait_stream(self, other: Any) -> None:
            self._wait(other.through())

        def wait_event(self, event: Any) -> None:
            self._wait(event.at or 0.0)

        def record_event(self, event: Any = None) -> Any:
            event = event or Event()
            event.record(self)
            return event

        def _wait(self, time: float) -> None:
            self._clock.streams[self.stream_id] = max(self.through(), time)

        def __enter__(self) -> Any:
            context = within(self)
            self.__dict__.setdefault("_within", []).append(context)
            return context.__enter__()

        def __exit__(self, *error: Any) -> Any:
            return self._within.pop().__exit__(*error)

        def __eq__(self, other: object) -> bool:
            return isinstance(other, Stream) and (self.device_index, self.stream_id) == (
                other.device_index,
                other.stream_id,
            )

        def __hash__(self) -> int:
            return hash((self.device_index, self.stream_id))

    class Event(event_base):  # type: ignore[misc,valid-type]
        """A point in time on a stream."""

        def __init__(
            self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False
        ) -> None:
            self.at: float | None = None
            self._clock = machine.clock

        def record(self, stream: Any = None) -> None:
            stream = stream or current()
            self._clock = machine.clocks[stream.device_index]
            self._clock.settle()
            self.at = max(stream.through(), self._clock.host())

        def wait(self, stream: Any = None) -> None:
            (stream or current()).wait_event(self)

        def query(self) -> bool:
            return self.at is None or self.at <= self._clock.host()

        def synchronize(self) -> None:
            if self.at is not None:
                self._clock.wait_until(self.at)

        def elapsed_time(self, other: Any) -> float:
            """Return the milliseconds between this event and another one."""
            if self.at is None or other.at is None:
                raise RuntimeError("Both events must be recorded before calculating elapsed time.")
            return float(other.at - self.at) * 1000

    def current(device: Any = None) -> Any:
        index = _index(machine, device)
        return Stream(index, number=machine.streams[index])

    @contextlib.contextmanager
    def within(stream: Any) -> Iterator[Any]:
        if stream is None:
            yield None
            return
        before = machine.streams[stream.device_index]
        machine.streams[stream.device_index] = stream.stream_id
        try:
            yield stream
        finally:
            machine.streams[stream.device_index] = before

    def set_stream(chosen: Any) -> None:
        machine.streams[chosen.device_index] = chosen.stream_id

    return {
        "Stream": Stream,
        "ExternalStream": Stream,
        "Event": Event,
        "stream": within,
        "StreamContext": within,
        "set_stream": set_stream,
        "current_stream": current,
        "default_stream": lambda device=None: Stream(_index(machine, device), number=0),
    }


def _abstract(name: str) -> type:
    """Return the base class that some torch versions require of streams and events, if it needs no driver."""
    kind = getattr(sys.modules.get("torch._streambase"), name, object)
    return kind if inspect.isabstract(kind) else object


def _around(machine: Machine) -> None:
    """Replace other functions that query the driver or cannot be emulated."""
    torch = machine.torch
    for name in ("range_push", "range_pop", "range_start", "range_end", "mark"):
        setattr(torch.cuda.nvtx, name, lambda *_args, **_kwargs: None)
    torch.cuda.nvtx.range = lambda *_args, **_kwargs: contextlib.nullcontext()
    for name, answer in (("is_available", True), ("is_built", True)):
        setattr(torch.backends.cuda, name, lambda answer=answer: answer)
    torch.backends.cudnn.is_available = lambda: True
    torch.backends.cudnn.is_acceptable = lambda tensor: False
    if hasattr(torch.backends, "mha"):
        torch.backends.mha.set_fastpath_enabled(False)
    accelerator = getattr(torch, "accelerator", None)
    if accelerator is not None:
        accelerator.is_available = lambda: True
        accelerator.device_count = lambda: machine.count
        accelerator.current_accelerator = lambda check_available=False: torch.device("cuda")
        accelerator.current_device_index = lambda: machine.current
        accelerator.set_device_index = torch.cuda.set_device
        accelerator.synchronize = torch.cuda.synchronize
        accelerator.current_stream = torch.cuda.current_stream
    torch.compile = _uncompiled
    torch.jit.script = lambda code, *_args, **_kwargs: code
    torch.nn.Module.compile = lambda self, *_args, **_kwargs: None
    # Checks that depend on values are not possible.
    importlib.import_module("torch.distributions").Distribution.set_default_validate_args(False)
    # Whether gradients are finite is unknown: always step, as almost all iterations do.
    scaler = importlib.import_module("torch.amp.grad_scaler").GradScaler
    scaler._maybe_opt_step = lambda self, optimizer, state, *args, **kwargs: optimizer.step(*args, **kwargs)


def _uncompiled(model: Any = None, **_: Any) -> Any:
    """Return the model unchanged, because torch.compile requires a GPU."""
    return model if model is not None else lambda function: function


LOWER = frozenset(
    [
        "__matmul__",
        "__rmatmul__",
        "addbmm",
        "addmm",
        "addmv",
        "addr",
        "baddbmm",
        "bmm",
        "chain_matmul",
        "multi_dot",
        "conv1d",
        "conv2d",
        "conv3d",
        "conv_transpose1d",
        "conv_transpose2d",
        "conv_transpose3d",
        "linear",
        "matmul",
        "mm",
        "mv",
        "einsum",
        "prelu",
        "scaled_dot_product_attention",
        "lstm",
        "gru",
        "rnn_tanh",
        "rnn_relu",
        "lstm_cell",
        "gru_cell",
        "rnn_tanh_cell",
        "rnn_relu_cell",
    ]
)
FULL = frozenset(
    [
        "__pow__",
        "__rdiv__",
        "__rpow__",
        "acos",
        "asin",
        "binary_cross_entropy_with_logits",
        "cosh",
        "cosine_embedding_loss",
        "cdist",
        "cosine_similarity",
        "cross_entropy",
        "cumprod",
        "cumsum",
        "dist",
        "erfinv",
        "exp",
        "expm1",
        "group_norm",
        "hinge_embedding_loss",
        "kl_div",
        "l1_loss",
        "layer_norm",
        "log",
        "log10",
        "log_softmax",
        "log1p",
        "log2",
        "margin_ranking_loss",
        "mse_loss",
        "multilabel_margin_loss",
        "multi_margin_loss",
        "nll_loss",
        "norm",
        "normalize",
        "pdist",
        "poisson_nll_loss",
        "pow",
        "prod",
        "reciprocal",
        "rsqrt",
        "sinh",
        "smooth_l1_loss",
        "soft_margin_loss",
        "softmax",
        "softmin",
        "softplus",
        "sum",
        "renorm",
        "tan",
        "triplet_margin_loss",
    ]
)


def install_autocast(machine: Machine) -> None:
    """Make `torch.autocast("cuda")` cast tensors of emulated devices."""
    torch = machine.torch
    kind = torch.amp.autocast_mode.autocast
    enter, leave = kind.__enter__, kind.__exit__
    precisions: list[Any] = []

    def start(self: Any) -> Any:
        context = enter(self)
        if self.device == "cuda":
            precisions.append(self.fast_dtype if self._enabled else None)
        return context

    def stop(self: Any, *error: Any) -> Any:
        if self.device == "cuda":
            precisions.pop()
        return leave(self, *error)

    kind.__enter__, kind.__exit__ = start, stop
    for names, lower in ((LOWER, True), (FULL, False)):
        for name in sorted(names):
            for holder in (torch, torch.nn.functional, torch.Tensor, torch._VF, torch._C._nn):
                if callable(function := getattr(holder, name, None)):
                    setattr(holder, name, _casting(machine, function, precisions, lower=lower))


def _casting(machine: Machine, function: Any, precisions: list[Any], *, lower: bool) -> Any:
    """Return the function with its arguments cast inside an autocast region.

    `precisions` are the lower precisions of the current regions, None where casting is off.
    """
    torch = machine.torch
    plain = frozenset({torch.float16, torch.bfloat16, torch.float32})

    def cast(value: Any, dtype: Any) -> Any:
        if isinstance(value, torch.Tensor):
            if value.dtype in plain and value.dtype is not dtype and machine.find(value) is not None:
                return value.to(dtype)
            return value
        if type(value) in (list, tuple):
            return type(value)(cast(item, dtype) for item in value)
        return value

    @functools.wraps(function)
    def casting(*args: Any, **kwargs: Any) -> Any:
        if not precisions or precisions[-1] is None:
            return function(*args, **kwargs)
        dtype = precisions[-1] if lower else torch.float32
        return function(*cast(args, dtype), **{key: cast(item, dtype) for key, item in kwargs.items()})

    return casting
