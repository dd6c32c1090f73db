"""T3: what the framework's compiler makes for this GPU agrees with eager execution and with float64."""

from __future__ import annotations

from ...context import Finding
from .. import reference, tolerances
from ..context import GpuContext
from .numbers import Ledger


def check_jit(context: GpuContext) -> Finding:
    """A product, functions, a reduction and their gradient, as one compiled function."""
    ledger, inner = Ledger(context), 256
    inputs = reference.numbers(51, (1000, inner), "float32")
    weights = reference.numbers(52, (inner, 96), "float32")
    wanted, bound = reference.fused(inputs, weights), tolerances.compiled(1000)
    eager, compiled, how = context.framework.compile(context, inputs, weights)
    for name, want in wanted.items():
        ledger.compare(f"eager-{name}", eager[name], want, bound)
        ledger.compare(f"compiled-{name}", compiled[name], want, bound)
        both = reference.Want(eager[name], want.scale)
        ledger.compare(f"compiled-against-eager-{name}", compiled[name], both, bound)
    return ledger.finding(how)
