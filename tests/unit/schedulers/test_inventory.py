"""Inventories as files: what is written is read again, and what is none is told by its place."""

from __future__ import annotations

import json
import os
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from imagefactory.errors import EXIT_USAGE, ImagefactoryError, UsageError
from imagefactory.schedulers import inventory
from imagefactory.schedulers.htcondor.ads import parse_ads
from imagefactory.schedulers.inventory import (
    format_inventory,
    parse_inventory,
    read_inventory,
    write_inventory,
)
from imagefactory.schedulers.pool import Inventory
from tests.made.ads import A100, MIG_SLICE, V100, gpu, slot
from tests.made.documents import document_faults
from tests.made.errors import fails

NOW = datetime(2026, 11, 22, 6, tzinfo=UTC)
SMALL: dict[str, Any] = {
    "format": "imagefactory.inventory/1",
    "machines": [{"name": "gpu01", "gpus": [{"capability": "8.6"}, {"capability": "8.6"}]}],
}


def a_pool() -> Inventory:
    return parse_ads(
        [
            slot("gpu01", [gpu("GPU-11111111", A100, NvidiaDriver="550.54.15"), gpu("GPU-22222222", V100)]),
            slot("gpu02", [gpu("MIG-5f3e8c2a", MIG_SLICE)], used=("MIG-5f3e8c2a",), Start="/Expr(a > 1)/"),
            slot("gpu03", [gpu("GPU-33333333", A100, Capability=None)]),
        ],
        NOW,
    )


def test_without_a_time_the_files_own_counts(tmp_path: Path) -> None:
    file = tmp_path / "mine.json"
    file.write_text(json.dumps(SMALL))
    os.utime(file, (NOW.timestamp(), NOW.timestamp()))
    assert read_inventory(file).taken == NOW


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    before = a_pool()
    file = tmp_path / "inventory.json"
    write_inventory(file, before)
    assert read_inventory(file) == before
    assert before.notes
    assert format_inventory(read_inventory(file)) == file.read_text()
    assert document_faults(json.loads(file.read_text())) == []
    assert sum('"gpus"' in line for line in file.read_text().splitlines()) == 2  # a line each
    assert json.loads(format_inventory(Inventory(pool="", taken=NOW, machines=())))["machines"] == []


def test_a_newer_one_takes_the_place_of_an_older_and_of_nothing_else(tmp_path: Path) -> None:
    file = tmp_path / "inventory.json"
    for _ in range(2):
        write_inventory(file, a_pool())
    other = tmp_path / "thesis.txt"
    other.write_text("years of work")
    for place in (other, tmp_path):
        with fails("file-exists", message=str(place)):
            write_inventory(place, a_pool())
    with fails("cannot-write-file"):
        write_inventory(tmp_path / "none" / "inventory.json", a_pool())
    assert other.read_text() == "years of work"
    assert sorted(one.name for one in tmp_path.iterdir()) == ["inventory.json", "thesis.txt"]


def test_a_person_writes_no_more_than_is_needed() -> None:
    found = parse_inventory(json.dumps(SMALL), "mine.json", NOW)
    assert [(one.capability, one.memory, one.driver, one.free, one.mig) for one in found.gpus] == [
        ("8.6", 0, "", True, False)
    ] * 2


def changed(path: str, value: object) -> str:
    """SMALL with a value put where `path` (a.0.b) says."""
    document = json.loads(json.dumps(SMALL))
    *way, last = path.split(".")
    there = document
    for step in way:
        there = there[int(step)] if isinstance(there, list) else there[step]
    there[last] = value
    return json.dumps(document)


@pytest.mark.parametrize(
    ("path", "value", "said", "hint"),
    [
        ("format", "imagefactory.inventory/2", "format:", "imagefactory.inventory/1"),
        ("pool", "a b", "pool:", "the pool's name"),
        ("taken", "yesterday", "taken:", "2026-11-22T06:00:00Z"),
        ("taken", 7, "taken:", "UTC"),
        ("machine", [], "unknown key 'machine'", "did you mean 'machines'?"),
        ("machines", {}, "machines: {}", "a list"),
        ("machines.0.name", "gpu01 evil", 'machines[0].name: "gpu01 evil"', "letters, digits"),
        ("machines.0.name", "", "machines[0].name:", "the name of the machine"),
        ("machines.0.start", "a\nb", "machines[0].start:", "one line"),
        ("machines.0.attributes", {"a b": 1}, "machines[0].attributes:", "name of an attribute"),
        ("machines.0.attributes", {"a": 10**400}, "machines[0].attributes.a: 1000", "a number"),
        ("machines.0.attributes", {"a": [1]}, "machines[0].attributes.a: [1]", "a number"),
        ("machines.0.attributes", {"a": "\x1b[2J"}, "machines[0].attributes.a:", "one line"),
        ("machines.0.gpus", [7], "machines[0].gpus[0]: 7", "capability"),
        ("machines.0.gpus.1.capability", 8.6, "machines[0].gpus[1].capability: 8.6", "such as 8.6"),
        ("machines.0.gpus.1.capability", "86", "machines[0].gpus[1].capability", "such as 8.6"),
        ("machines.0.gpus.1.memory", "8GB", "gpus[1].memory:", "bytes"),
        ("machines.0.gpus.1.memory", True, "gpus[1].memory: true", "bytes"),
        ("machines.0.gpus.1.driver", "new", "gpus[1].driver:", "550.54.15"),
        ("machines.0.gpus.1.driver", 550, "gpus[1].driver: 550", "550.54.15"),
        ("machines.0.gpus.1.cuda", "12", "gpus[1].cuda:", "12.4"),
        ("machines.0.gpus.1.id", "GPU-1; rm", "gpus[1].id:", "GPU-a0223334"),
        ("machines.0.gpus.1.mig", "no", "gpus[1].mig:", "true or false"),
        ("machines.0.gpus.1.nane", "A100", "machines[0].gpus[1]: unknown key 'nane'", "did you mean 'name'?"),
    ],
)
def test_a_fault_is_told_by_its_place_and_what_to_write(
    path: str, value: object, said: str, hint: str
) -> None:
    with pytest.raises(UsageError) as fault:
        parse_inventory(changed(path, value), "pool.json", NOW)
    assert fault.value.code == (
        "inventory-key-unknown" if "unknown key" in said else "inventory-value-invalid"
    )
    assert fault.value.message.startswith("pool.json: ")
    assert said in fault.value.message
    assert hint in fault.value.hint


@pytest.mark.parametrize(
    ("text", "code", "said"),
    [
        ("", "inventory-not-json", "f.json:1:1: "),
        ("{\n]", "inventory-not-json", "f.json:2:1: "),
        ('{"format": "imagefactory.inventory/1"}', "inventory-key-missing", "'machines'"),
        ('{"machines": [], "machines": []}', "inventory-not-json", "'machines'"),
        ('{"machines": NaN}', "inventory-not-json", "NaN"),
        (
            '{"format": "imagefactory.inventory/1", "machines": [{"name": "a"}]}',
            "inventory-key-missing",
            "'gpus'",
        ),
        ('{"a":' * 100_000, "inventory-not-json", "f.json: "),
    ],
)
def test_what_is_no_inventory_is_refused(text: str, code: str, said: str) -> None:
    with fails(code, message=said):
        parse_inventory(text, "f.json", NOW)


def test_files_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for place in (tmp_path, tmp_path / "none.json"):
        with fails("inventory-not-found", message=str(place)):
            read_inventory(place)
    file = tmp_path / "inventory.json"
    file.write_bytes(b"\xff")
    with fails("inventory-not-text"):
        read_inventory(file)
    monkeypatch.setattr(inventory, "MAX_BYTES", 100)
    file.write_text(json.dumps(SMALL))
    with fails("inventory-too-large"):
        read_inventory(file)


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=12),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=5,
)
PLACES = ("pool", "taken", "machines", "notes", "machines.0.name", "machines.0.attributes", "machines.0.gpus")


@given(st.sampled_from((*PLACES, "machines.0.gpus.0.capability", "machines.0.gpus.0.driver")), anything)
def test_a_reader_gives_an_inventory_or_a_fault(path: str, value: object) -> None:
    try:
        found = parse_inventory(changed(path, value), "pool.json", NOW)
    except UsageError as fault:
        told = fault.message
    else:
        assert parse_inventory(format_inventory(found), "again", NOW) == found
        told = ""
    assert told.isprintable()


YAML = """
# machines of a lab
format: imagefactory.inventory/1
machines:
  - name: gpu01
    gpus:
      - {capability: 8.0, name: A100, memory: 42503241728, driver: 550.54.15}
"""


def test_yaml_is_read_as_json() -> None:
    now = datetime(2026, 11, 27, tzinfo=UTC)
    found = parse_inventory(YAML, "pool.yaml", now)
    (one,) = found.gpus
    assert (one.capability, one.name, one.memory, one.driver) == ("8.0", "A100", 42503241728, "550.54.15")
    assert (found.taken, found.listed) == (now, False)
    assert parse_inventory(format_inventory(found), "pool.json", now) == found


@pytest.mark.parametrize(
    "text", ["- {name: V100, count: 9}\n- 8.6\n", "# mine\n\n[{name: V100, count: 9}, {capability: '8.6'}]"]
)
def test_a_list_of_gpus_is_an_inventory(text: str) -> None:
    text = text.replace("- 8.6", "- capability: 8.6")
    found = parse_inventory(text, "gpus.yaml", datetime(2026, 11, 27, tzinfo=UTC))
    assert [(gpu.name, gpu.capability) for gpu in found.gpus] == [*[("V100", "7.0")] * 9, ("", "8.6")]
    assert [len(machine.gpus) for machine in found.machines] == [8, 1, 1]
    assert found.listed


@pytest.mark.parametrize(
    "text", ["hello", "- {nam: V100}", "{", "format: x", "", "a: 1\na: 2", "- name: V100\n  count: 1000000\n"]
)
def test_neither_an_inventory_nor_a_list_is_a_usage_error(text: str) -> None:
    with pytest.raises(ImagefactoryError) as caught:
        parse_inventory(text, "gpus.yaml", datetime(2026, 11, 27, tzinfo=UTC))
    assert caught.value.exit_code == EXIT_USAGE
    assert "gpus.yaml" in caught.value.message
