"""`compute`: small computations of the framework agree with a float64 reference made by plain Python."""

from __future__ import annotations

from .. import reference, table
from ..context import Context, Failure, Finding


def check(context: Context) -> Finding:
    framework, name = context.framework, context.expected.framework
    framework.prepare()
    case = reference.make_case()
    calls = {
        "matmul": ((case.left, case.right), reference.matmul),
        "total": ((case.values,), reference.total),
        "convolution": ((case.image, case.filters), reference.convolution),
        "solve": ((case.square, case.side), reference.solve),
        "gradient": ((case.left, case.right), reference.gradient),
    }
    numbers, wrong, skipped = {}, [], []
    for operation, kinds in table.OPERATIONS.items():
        inputs, expect = calls[operation]
        expected = expect(*inputs)  # type: ignore[operator]
        for kind in kinds:
            if table.operation_not_applicable(name, operation, kind):
                skipped.append(f"{operation} {kind}")
                continue
            error = reference.error(getattr(framework, operation)(*inputs, kind), expected)
            numbers[f"{operation}-{kind}-error"] = min(error, 1e300)  # JSON has no infinity
            if not error <= reference.TOLERANCES[kind]:
                wrong.append(
                    f"{operation} in {kind} is off by {error:.2g} (at most {reference.TOLERANCES[kind]:.0e})"
                )
    if wrong:
        raise Failure("; ".join(wrong), outcome=table.WRONG_NUMBERS)
    detail = f"{len(numbers)} computations agree with float64"
    return Finding(detail + (f"; not applicable: {', '.join(skipped)}" if skipped else ""), numbers)
