"""T2 and T3 of the GPU suite inside a real image, on the CPU: it is the image's own framework that works."""

from __future__ import annotations

from pathlib import Path

from imagefactory.suite.gpu import table
from tests.e2e import rehearsal
from tests.services.factory import Factory


def assert_numbers(factory: Factory, target: str, framework: str, folder: Path) -> None:
    """`framework` is a file of the suite's; `folder` was given to `rehearsal.prepare`."""
    rows = {
        check: row
        for part in ("numbers", "jit")
        for check, row in rehearsal.rehearse(factory, target, part, folder).items()
    }
    assert tuple(rows) == (*table.PARTS["numbers"], *table.PARTS["jit"])
    for check, row in rows.items():
        applies = not table.not_applicable(framework, check, {})
        assert row["state"] == ("passed" if applies else "not-applicable"), (check, row)
        assert not [name for name in row["numbers"] if name.endswith("per-s")]
        bounds = [name.removesuffix("-bound") for name in row["numbers"] if name.endswith("-bound")]
        assert all(row["numbers"][f"{name}-error"] <= row["numbers"][f"{name}-bound"] for name in bounds)
    assert len(rows["matmul"]["numbers"]) >= 12
    if not table.not_applicable(framework, "collective", {}):
        assert "NCCL 2." in rows["collective"]["detail"]
        assert "as locked" in rows["library-versions"]["detail"]
