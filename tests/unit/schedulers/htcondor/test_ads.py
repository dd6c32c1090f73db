"""A pool's machines from their ads: mixed, sliced, static, busy, offline, old and odd ones."""

from __future__ import annotations

import json
import re
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from imagefactory.gpu.capability import Capability
from imagefactory.gpu.knowledge.gpus import amd_gpus, processors
from imagefactory.schedulers.htcondor import ads
from imagefactory.schedulers.htcondor.ads import amd_name_expression, parse_ads, parse_status, processor_of
from imagefactory.schedulers.pool import Inventory, PoolGpu
from tests.made.ads import A100, A100_80, H100, MI210, MIG_SLICE, V100, dynamic, gpu, slot, status
from tests.made.errors import fails

NOW = datetime(2026, 11, 22, 6, tzinfo=UTC)


def read(*rows: dict[str, Any]) -> Inventory:
    """As they come from the command."""
    return parse_ads(parse_status(status(*rows)), NOW)


def told(inventory: Inventory) -> list[tuple[str, str, str, bool]]:
    return [(m.name, gpu.id, gpu.capability, gpu.free) for m in inventory.machines for gpu in m.gpus]


def test_a_gpu_is_read_from_its_nested_ad() -> None:
    found = read(slot("gpu01.example.org", [gpu("GPU-a0223334", A100, NvidiaDriver="550.54.15")]))
    assert (found.pool, found.taken, found.notes) == ("cm.example.org", NOW, ())
    assert found.gpus == (
        PoolGpu(
            id="GPU-a0223334",
            uuid="GPU-a0223334-4445-5667-899a-abbccddeeff0",
            name="NVIDIA A100-SXM4-40GB",
            capability="8.0",
            memory=40536 * 2**20,
            driver="550.54.15",
            cuda="12.4",
            mig=False,
            free=True,
        ),
    )


def test_a_mixed_machine_has_both_kinds_though_it_shares_no_capability() -> None:
    mixed = slot("mixed01", [gpu("GPU-11111111", V100), gpu("GPU-22222222", A100)], used=("GPU-22222222",))
    assert "GPUs_Capability" not in mixed
    assert told(read(mixed)) == [
        ("mixed01", "GPU-11111111", "7.0", True),
        ("mixed01", "GPU-22222222", "8.0", False),
    ]


def test_a_gpu_that_a_job_has_is_there_once_and_not_free() -> None:
    busy = slot("gpu01", [gpu("GPU-11111111", A100)], used=("GPU-11111111",))
    assert told(read(busy, dynamic(busy, 1, "GPU-11111111"))) == [("gpu01", "GPU-11111111", "8.0", False)]


def test_static_slots_of_a_machine_are_one_machine_and_their_state_says_what_is_free() -> None:
    static: dict[str, Any] = {"PartitionableSlot": None, "SlotType": "Static", "TotalGPUs": 2}
    first = slot("old01", [gpu("GPU-11111111", V100)], State="Claimed", **static)
    second = slot("old01", [gpu("GPU-22222222", V100)], Name="slot2@old01", Memory=8000, **static)
    none = slot("old01", [], Name="slot3@old01", **static)
    found = read(first, second, none)
    assert told(found) == [("old01", "GPU-11111111", "7.0", False), ("old01", "GPU-22222222", "7.0", True)]
    assert found.machines[0].attributes["Memory"] == 400_000  # the greatest one's


@pytest.mark.parametrize("state", ["Owner", "Drained", "Claimed", "Preempting"])
def test_nothing_is_free_on_a_slot_that_takes_no_jobs(state: str) -> None:
    assert [gpu.free for gpu in read(slot("gpu01", [gpu("GPU-11111111", A100)], State=state)).gpus] == [False]


def test_what_is_offline_is_left_out_and_told() -> None:
    found = read(
        slot("gpu01", [gpu("GPU-11111111", A100), gpu("GPU-22222222", A100)], OfflineGPUs="GPU-22222222")
    )
    assert [one.id for one in found.gpus] == ["GPU-11111111"]
    assert found.notes == ("gpu01: GPU-22222222 is offline",)


@pytest.mark.parametrize(
    ("id", "uuid"),
    [
        ("MIG-5f3e8c2a", "MIG-5f3e8c2a-1111-2222-3333-444455556666"),  # drivers from 470 on
        ("MIG-GPU-5f3e8c2a/1/0", "MIG-GPU-5f3e8c2a-1111-2222-3333-444455556666/1/0"),
    ],
)
def test_a_slice_is_a_class_of_its_own(id: str, uuid: str) -> None:
    found = read(slot("gpu01", [gpu(id, MIG_SLICE, DeviceUuid=uuid)]))
    assert [(one.id, one.uuid, one.mig, one.free) for one in found.gpus] == [(id, uuid, True, True)]


def test_a_slice_by_its_name_alone_is_one_too() -> None:
    assert [one.mig for one in read(slot("gpu01", [gpu("CUDA0", MIG_SLICE)])).gpus] == [True]


def test_what_tells_no_capability_is_left_out_for_no_job_that_asks_for_one_gets_it() -> None:
    found = read(slot("gpu01", [gpu("MIG-5f3e8c2a", MIG_SLICE, Capability=None), gpu("GPU-11111111", A100)]))
    assert [one.id for one in found.gpus] == ["GPU-11111111"]
    assert found.notes == (
        "gpu01: MIG-5f3e8c2a is skipped: it reports no Capability, and no job that requests one matches it",
    )


@pytest.mark.parametrize(
    ("properties", "capability"),
    [
        (MI210, "gfx90a"),
        ({**MI210, "DeviceName": "AMD Instinct MI50/MI60"}, "gfx906"),
        (
            {"Capability": 9.4, "DeviceName": "AMD Instinct MI300A", "Rocm": 6, "GlobalMemoryMb": 131072},
            "gfx942",
        ),
        ({"Capability": 11.0, "DeviceName": "AMD Radeon RX 7900 XTX", "Rocm": 7}, "gfx1100"),
        ({"Capability": 9.0, "DeviceName": "gfx90a:sramecc+:xnack-"}, "gfx90a"),
        ({"Capability": 9.4, "DeviceName": "AMD Instinct MI210", "Rocm": 6}, ""),  # the numbers contradict it
        ({"Capability": 9.0, "DeviceName": "AMD Radeon Graphics", "Rocm": 6}, ""),
        ({"Capability": 9.0, "xNACK": 0}, ""),
    ],
)
def test_gpus_of_amd_have_the_processor_that_their_name_tells(
    properties: dict[str, Any], capability: str
) -> None:
    found = read(slot("amd01", [gpu("GPU-11111111", properties)]))
    assert told(found) == [("amd01", "GPU-11111111", capability, True)]
    assert found.gpus[0].cuda == ""
    assert found.notes == ()


def test_an_amd_gpu_without_numbers_is_skipped() -> None:
    assert read(slot("amd01", [gpu("GPU-1", {**MI210, "Capability": None})])).machines == ()


@pytest.mark.parametrize("processor", processors(), ids=str)
def test_an_expression_is_true_for_the_gpus_of_a_processor_alone(processor: Capability) -> None:
    (pattern,) = re.findall(r'regexp\("(.*)", DeviceName, "i"\)', amd_name_expression(processor))
    for one in amd_gpus():
        name = f"AMD Radeon {one.name}"
        matches = re.search(pattern, name, re.IGNORECASE) is not None
        numbers = (one.processor.major, one.processor.minor) == (processor.major, processor.minor)
        assert (matches and numbers) == (one.processor == processor), name
        assert processor_of(name, one.processor) == str(one.processor)


def test_flat_attributes_fill_what_nested_ads_leave_out_or_stand_for_them() -> None:
    sparse = slot("gpu01", [gpu("GPU-11111111", A100), gpu("GPU-22222222", A100)])
    for name in ("GPUs_GPU_11111111", "GPUs_GPU_22222222"):
        sparse[name] = {"Id": sparse[name]["Id"], "DeviceUuid": sparse[name]["DeviceUuid"]}
    assert told(read(sparse)) == [
        ("gpu01", "GPU-11111111", "8.0", True),
        ("gpu01", "GPU-22222222", "8.0", True),
    ]
    flat = {key: value for key, value in sparse.items() if not key.startswith("GPUs_GPU_")}
    assert told(read(flat | {"AvailableGPUs": None, "AssignedGPUs": "CUDA0, CUDA1"})) == [
        ("gpu01", "CUDA0", "8.0", True),
        ("gpu01", "CUDA1", "8.0", True),
    ]


def test_attributes_are_found_however_their_letters_are_written() -> None:
    odd = {key.upper(): value for key, value in slot("gpu01", [gpu("GPU-11111111", A100)]).items()}
    assert told(read(odd)) == [("gpu01", "GPU-11111111", "8.0", True)]


@pytest.mark.parametrize(
    ("more", "cuda"),
    [
        ({"DriverVersion": 12.8}, "12.8"),
        ({"DriverVersion": 13}, "13.0"),
        ({"DriverVersion": None}, "12.4"),
        ({"DriverVersion": None, "MaxSupportedVersion": 11080}, "11.8"),
        ({"DriverVersion": None, "MaxSupportedVersion": None}, ""),
        ({"DriverVersion": "new", "MaxSupportedVersion": True}, ""),
    ],
)
def test_which_cuda_the_driver_takes(more: dict[str, Any], cuda: str) -> None:
    assert [one.cuda for one in read(slot("gpu01", [gpu("GPU-11111111", A100, **more)])).gpus] == [cuda]


@pytest.mark.parametrize("place", ["Capability", "GlobalMemoryMb", "DriverVersion", "MaxSupportedVersion"])
def test_a_number_that_no_machine_counts_to_is_none(place: str) -> None:
    far = 10**400
    assert len(read(slot("gpu01", [gpu("GPU-11111111", A100, **{place: far})], Memory=far)).gpus) == (
        place != "Capability"
    )


@pytest.mark.parametrize(
    ("capability", "read_as"), [(12.0, "12.0"), (10.3, "10.3"), (9, "9.0"), (8.600000381, "8.6")]
)
def test_a_capability_is_a_number_with_one_digit(capability: float, read_as: str) -> None:
    found = read(slot("gpu01", [gpu("GPU-11111111", A100, Capability=capability)]))
    assert [one.capability for one in found.gpus] == [read_as]


def test_two_startds_of_a_computer_are_two_machines_and_a_gpu_that_both_tell_is_one() -> None:
    first = slot("vm", [gpu("GPU-a0223334", V100)], Name="slot1@v100@vm")
    second = slot("vm", [gpu("GPU-a0223334", A100)], Name="slot1@a100@vm")
    again = slot("vm", [gpu("GPU-a0223334", V100)], Name="slot1@zz@vm")
    assert told(read(first, second, again)) == [
        ("a100@vm", "GPU-a0223334", "8.0", True),
        ("v100@vm", "GPU-a0223334", "7.0", True),
    ]


def test_a_gpu_that_is_given_out_in_parts_is_one() -> None:
    shared = slot("gpu01", [gpu("GPU-11111111", A100)], AssignedGPUs="GPU-11111111, GPU-11111111")
    assert len(read(shared).gpus) == 1


def test_of_a_machine_is_kept_what_jobs_may_ask_for_and_nothing_of_who_works_there() -> None:
    (machine,) = read(
        slot("gpu01", [gpu("GPU-11111111", A100)], Start="/Expr(TARGET.WantGPULab =?= true)/")
    ).machines
    assert machine.start == "TARGET.WantGPULab =?= true"
    assert machine.attributes["OpSysAndVer"] == "CentOS9"
    # The whole slot's, not what its jobs have left.
    assert (machine.attributes["Cpus"], machine.attributes["Memory"]) == (128, 515_000)
    assert not {"RemoteOwner", "MyAddress", "LoadAvg", "Requirements", "AvailableGPUs"} & {
        *machine.attributes
    }


@pytest.mark.parametrize("name", ["slot1@gpu01 evil", "slot1@gpu01\n", "", None, 7, "slot1@" + "x" * 300])
def test_a_machine_whose_name_is_none_is_left_out(name: object) -> None:
    found = read(slot("gpu01", [gpu("GPU-11111111", A100)], Name=name, Machine=None))
    assert found.machines == ()
    assert [note.endswith("skipped, its name is invalid") for note in found.notes] == [True]


def test_values_that_are_no_plain_ones_get_nowhere() -> None:
    odd = gpu("GPU-11111111", A100, DeviceName="A100\x1b[2J", DeviceUuid="x y", NvidiaDriver="new; rm")
    (found,) = read(slot("gpu01", [odd], Evil="a\nb", **{"a b": 1})).machines
    assert (found.gpus[0].name, found.gpus[0].uuid, found.gpus[0].driver) == ("", "", "")
    assert not {"Evil", "a b"} & {*found.attributes}


def test_notes_are_counted_where_they_are_many() -> None:
    every = [gpu(f"GPU-{number:08x}", A100) for number in range(300)]
    found = read(slot("gpu01", every, OfflineGPUs=",".join(one["Id"] for one in every)))
    assert len(found.notes) == ads.MAX_NOTES + 1
    assert found.notes[-1] == "and 100 more"


# --- what the command prints ---------------------------------------------------------------------


def test_an_empty_pool_prints_nothing_or_an_empty_list() -> None:
    assert [list(parse_status(text)) for text in ("", "\n", "[\n]\n", "[]")] == [[], [], [], []]


@pytest.mark.parametrize(
    "text",
    [
        "{}",
        "Error: communication error",
        "[1]",
        '[{"a": 1}',
        '[{"a": 1},',
        "[",
        '[{"a": }]',
        '[{"a": 1} {}]',
        "[" * 100_000,
    ],
)
def test_what_is_no_list_of_ads_is_refused(text: str) -> None:
    with fails("condor-output-invalid"):
        list(parse_status(text))


def test_a_pool_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ads, "MAX_ADS", 2)
    with fails("pool-too-large", message="2 slots"):
        read(*(slot(f"gpu{n:02}", [gpu("GPU-11111111", A100)]) for n in range(3)))


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
KEYS = (
    "Name",
    "Machine",
    "State",
    "Start",
    "AssignedGPUs",
    "AvailableGPUs",
    "OfflineGPUs",
    "GPUs_GPU_11111111",
)


@given(st.dictionaries(st.sampled_from((*KEYS, "GPUs_Capability", "Memory", "DynamicSlot")), values))
def test_no_ad_whatsoever_breaks_the_reader(odd: dict[str, Any]) -> None:
    good = slot("gpu02", [gpu("GPU-22222222", H100), gpu("GPU-33333333", A100_80)])
    text = json.dumps([slot("gpu01", [gpu("GPU-11111111", A100)]) | odd, good])
    found = parse_ads(parse_status(text), NOW)
    assert (
        {gpu.id for gpu in found.gpus} >= {"GPU-22222222", "GPU-33333333"}
        or "Machine" in odd
        or "Name" in odd
    )
    assert all(note.isprintable() for note in found.notes)
