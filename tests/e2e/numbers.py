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


def assert_several(factory: Factory, target: str, folder: Path) -> None:
    """Two processes stand in for two GPUs. The sum of one is made wrong: that is seen, and no other is."""
    worker = folder / "suite/gpu/frameworks/torch_ranks.py"
    sound, line = worker.read_text(), "    distributed.all_reduce(tensor)\n"
    assert sound.count(line) == 1
    worker.write_text(sound.replace(line, f"{line}    tensor[0] += rank\n"))
    rows = rehearsal.rehearse(factory, target, "several", folder)
    worker.write_text(sound)
    wrong = rows.pop("all-reduce")
    assert (wrong["state"], wrong["outcome"]) == ("failed", "wrong-numbers"), wrong
    assert wrong["detail"] == "wrong sums: 1024 bytes in process 1, 1048576 bytes in process 1"
    assert {check: row["state"] for check, row in rows.items()} == {
        "gpus": "passed",
        "peer-to-peer": "passed",
        "data-parallel": "passed",
    }
    assert all("rehearsed on the CPU" in row["detail"] for row in rows.values())
