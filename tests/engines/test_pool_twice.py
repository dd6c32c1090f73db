"""Two sweeps of the same cell on the real pool: the queue tells the second what the first has in hand."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.engines.pool_ground import PoolGround, make_ground
from tests.engines.pool_sweeps import submit, wait_for
from tests.services.condor import CondorPool


@pytest.fixture(scope="module")
def ground(pool: CondorPool) -> PoolGround:
    return make_ground(pool, pool.home / "twice", ("hang",))


def planned(ground: PoolGround) -> dict[str, Any]:
    asked = ("verify", ground.name("hang"), "--pool", "htcondor", "--image", "sif", "--capability", "9.0")
    found = json.loads(ground.run(*asked, "--dry-run", "--json", err=False))
    assert isinstance(found, dict)
    return found


def test_what_a_sweep_has_queued_is_not_queued_again_until_it_is_cancelled(ground: PoolGround) -> None:
    first = submit(ground, ("hang",), "--capability", "9.0")
    made = planned(ground)
    (left,) = (row for row in made["left_out"] if row["capability"] == "9.0")
    assert left["rule"] == "queued"
    assert left["reason"].startswith(f"queued in sweep {first.id}, since ")
    assert (made["queued"], made["notes"]) == ([], [])
    ground.run("cancel", first.id)
    wait_for("the end of dagman", first.is_left_alone)
    made = planned(ground)
    assert [row["capability"] for row in made["queued"]] == ["9.0"]
    assert f"sweep {first.id} stopped without an answer" in made["notes"][0]
