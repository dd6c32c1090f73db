"""Classes of GPUs as lines of a submit file: they match these classes and no others. Pure.

    one range, one driver    gpus_minimum_capability, gpus_maximum_capability, gpus_minimum_runtime
    all else                 require_gpus = member(Capability, {7.0, 8.0}) && DriverVersion >= 12.4
    and in both              require_gpus without slices of GPUs (MIG), a class of their own

What `require_gpus` names cancels the bounds of `gpus_*` without a word (condor_submit's manual), so what one
form compares the other does not name. `gpus_minimum_runtime` is compared with `MaxSupportedVersion` (12040)
and `DriverVersion` is a float (12.4): both are the newest CUDA that the driver takes.
"""

from __future__ import annotations

from collections.abc import Sequence

from imagefactory.gpu.capability import Capability
from imagefactory.gpu.knowledge.tables import numbers
from imagefactory.schedulers.htcondor.ads import WHOLE_GPUS
from imagefactory.schedulers.sizes import MB, format_size
from imagefactory.jobs.offer import GpuClass, known_capabilities


def format_gpu_request(
    classes: Sequence[GpuClass], memory: int = 0, *, slices: bool = False
) -> tuple[str, ...]:
    """The lines that match GPUs of these classes, with `memory` bytes of their own at least.

    `classes` is not empty and has no capability twice. With `slices` those of such GPUs match too.
    """
    chosen = sorted(classes, key=lambda gpu_class: gpu_class.capability)
    cudas = sorted({gpu_class.cuda for gpu_class in chosen}, key=lambda cuda: numbers(cuda or "0"))
    capabilities = [gpu_class.capability for gpu_class in chosen]
    if len(cudas) == 1 and is_range(capabilities):
        lines = [
            f"gpus_minimum_capability = {capabilities[0]}",
            f"gpus_maximum_capability = {capabilities[-1]}",
        ]
        lines += [f"gpus_minimum_runtime = {cudas[0]}"] if cudas[0] else []
        lines += [f"gpus_minimum_memory = {format_size(memory)}"] if memory else []
        lines += [] if slices else [f"require_gpus = {WHOLE_GPUS}"]
        return tuple(lines)
    groups = [_group([gpu_class for gpu_class in chosen if gpu_class.cuda == cuda], cuda) for cuda in cudas]
    expression = groups[0] if len(groups) == 1 else " || ".join(f"({group})" for group in groups)
    more = [f"GlobalMemoryMb >= {-(-memory // MB)}"] if memory else []
    more += [] if slices else [WHOLE_GPUS]
    both = f"({expression})" if more and len(groups) > 1 else expression
    return (f"require_gpus = {' && '.join([both, *more])}",)


def is_range(capabilities: Sequence[Capability]) -> bool:
    """Whether no other capability lies between the lowest and the highest.

    Of those that are newer than this program nobody knows what lies between them.
    """
    asked, known = set(capabilities), set(known_capabilities())
    between = {one for one in known if min(asked) <= one <= max(asked)}
    return len(asked) == 1 or between == asked


def _group(classes: Sequence[GpuClass], cuda: str) -> str:
    """An expression without `||`, so that it can be joined with others by `&&`."""
    listed = ", ".join(str(one.capability) for one in classes)
    which = f"Capability == {listed}" if len(classes) == 1 else f"member(Capability, {{{listed}}})"
    return f"{which} && DriverVersion >= {cuda}" if cuda else which
