"""Ads of slots as `condor_status -json` prints them, of machines that nobody here has."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

V100 = {"Capability": 7.0, "DeviceName": "Tesla V100-PCIE-16GB", "GlobalMemoryMb": 16160}
A100 = {"Capability": 8.0, "DeviceName": "NVIDIA A100-SXM4-40GB", "GlobalMemoryMb": 40536}
A100_80 = {"Capability": 8.0, "DeviceName": "NVIDIA A100-SXM4-80GB", "GlobalMemoryMb": 81251}
H100 = {"Capability": 9.0, "DeviceName": "NVIDIA H100 80GB HBM3", "GlobalMemoryMb": 81079}
MIG_SLICE = {"Capability": 8.0, "DeviceName": "NVIDIA A100-SXM4-40GB MIG 3g.20gb", "GlobalMemoryMb": 20096}
MI210 = {"Capability": 9.0, "DeviceName": "AMD Instinct MI210", "GlobalMemoryMb": 65520, "xNACK": 0}


def gpu(id: str, model: dict[str, Any], **more: Any) -> dict[str, Any]:
    """The nested ad of one GPU, with a UUID that begins as its id does."""
    uuid = f"{id.removeprefix('GPU-')}-4445-5667-899a-abbccddeeff0"
    return {"Id": id, "DeviceUuid": uuid, "DriverVersion": 12.4, "MaxSupportedVersion": 12040} | model | more


def slot(machine: str, gpus: Sequence[dict[str, Any]], **more: Any) -> dict[str, Any]:
    """A partitionable slot of all that a machine has; `more` replaces attributes, or with None removes them.

    `used` are the ids of GPUs that its jobs have.
    """
    used = more.pop("used", ())
    ids = [one["Id"] for one in gpus]
    names = {id: "GPUs_" + "".join(c if c.isalnum() else "_" for c in id) for id in ids}
    common = {
        f"GPUs_{key}": value
        for key, value in (gpus[0] if gpus else {}).items()
        if key != "Id" and all(one.get(key) == value for one in gpus)
    }
    ad: dict[str, Any] = {
        "MyType": "Machine",
        "Name": f"slot1@{machine}",
        "Machine": machine,
        "COLLECTOR_HOST_STRING": "cm.example.org",
        "CondorVersion": "$CondorVersion: 24.0.7 2025-04-22 BuildID: 1 PackageID: 24.0.7-1 $",
        "OpSysAndVer": "CentOS9",
        "SlotType": "Partitionable",
        "PartitionableSlot": True,
        "State": "Unclaimed",
        "Start": True,
        "Requirements": "/Expr(START && (WithinResourceLimits))/",
        "Cpus": 100,
        "Memory": 400_000,
        "TotalSlotCpus": 128,
        "TotalSlotMemory": 515_000,
        "TotalGPUs": len(gpus),
        "TotalSlotGPUs": len(gpus),
        "GPUs": len(gpus) - len(used),
        "DetectedGPUs": ", ".join(ids),
        "AssignedGPUs": ",".join(ids),
        "AvailableGPUs": [f"/Expr({names[id]})/" for id in ids if id not in used],
        "RemoteOwner": "somebody@example.org",
        "MyAddress": "<192.0.2.7:9618?addrs=192.0.2.7-9618>",
        "LoadAvg": 3.5,
        **common,
        **{names[one["Id"]]: one for one in gpus},
    }
    return {key: value for key, value in (ad | more).items() if value is not None}


def dynamic(parent: dict[str, Any], number: int, id: str) -> dict[str, Any]:
    """The dynamic slot that a job with that GPU got of a partitionable one."""
    (name,) = (key for key, value in parent.items() if isinstance(value, dict) and value["Id"] == id)
    machine = parent["Machine"]
    return {
        **{key: value for key, value in parent.items() if not isinstance(value, dict)},
        **{"Name": f"slot1_{number}@{machine}", "DynamicSlot": True, "PartitionableSlot": None},
        **{"SlotType": "Dynamic", "State": "Claimed", "GPUs": 1, "AssignedGPUs": id, name: parent[name]},
        "AvailableGPUs": [f"/Expr({name})/"],
    }


def status(*ads: dict[str, Any]) -> str:
    """What `condor_status -json` prints: slashes are escaped, and no ads are no text at all."""
    if not ads:
        return ""
    return "[\n" + ",\n".join(json.dumps(ad, indent=2).replace("/", "\\/") for ad in ads) + "\n]\n"
