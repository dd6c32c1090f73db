"""A researcher's Job for Kubernetes: a manifest made of checked values. Pure.

    Form (image and what is proven of it) + Run + files -> format_manifest() -> FILE.yaml

Nodes are chosen by the labels of NVIDIA's GPU feature discovery, which tell capability, memory and the newest
CUDA that the driver takes. Of AMD's GPUs no label tells the processor: there the job looks at what it got.
The program and its inputs go into a ConfigMap, which holds 1 MiB. Source: Kubernetes' API, batch/v1 Job;
NVIDIA's k8s-device-plugin, "GPU Feature Discovery", Generated Labels; Linux, amdkfd's topology in /sys.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import yaml

from imagefactory.errors import UsageError
from imagefactory.gpu.capability import Capability
from imagefactory.jobs.htcondor import (
    ARCHITECTURES,
    JobImageSpec,
    SubmitCommand,
    check_columns,
    checked_address,
    checked_name,
    checked_path,
    comments,
    requested_resources,
)
from imagefactory.jobs.offer import GpuClass
from imagefactory.jobs.slurm import format_run_argument, no_macro, value_arrays
from imagefactory.schedulers.sizes import MB

SUFFIX = ".yaml"
FILES_MOST = 1_000_000
"""What a ConfigMap holds, less the room of its own fields."""
NVIDIA, AMD = "nvidia.com/gpu", "amd.com/gpu"
_SCRIPT_PATH, _SCRIPT = "/work", "imagefactory-run.sh"
_INDEX = "run"
_KEY = re.compile(r"[-._A-Za-z0-9]{1,200}")
_LABEL_MOST = 52
"""Of a Job's name: pods add their index and a random end, and have 63 letters."""
_GFX = re.compile(r"gfx([0-9]{1,2})([0-9a-f])([0-9a-f])")
_NODE_LABEL_COMMENT = """\
# No label of a node tells which processor its GPUs have. One on which this image was not tried stops here.
for told in $(sed -n 's/^gfx_target_version //p' /sys/class/kfd/kfd/topology/nodes/*/properties); do
    case $told in
    0 | %s) ;;
    *)
        echo "this node has a GPU of version $told; the image is proven on %s" >&2
        exit 9
        ;;
    esac
done"""


def format_manifest(
    taken: JobImageSpec, run: SubmitCommand, rows: Sequence[Sequence[str]], files: Mapping[str, bytes]
) -> str:
    """The text of a manifest. `files` are the program and its inputs by name, `rows` a sweep's.

    Raises UsageError for what cannot stand there or cannot be done.
    """
    for option, given in (
        ("--output-file", run.outputs),
        ("--checkpoint", run.checkpoint),
        ("--finalize", run.gather),
    ):
        if given:
            raise UsageError(
                "option-conflict",
                f"{option} does not work on Kubernetes, which does not return files",
                hint=f"remove {option}, and let the program write to a volume that you add to the manifest",
            )
    check_columns(run.columns[1:])
    name = job_name(run.name)
    script = _script(taken, run, rows)
    carried = {**files, **({_SCRIPT: script.encode()} if script else {})}
    _check_files(carried)
    documents = [_config_map(name, carried)] if carried else []
    documents.append(_job(name, taken, run, [*carried], len(rows)))
    told = "\n".join([*comments(taken, run), *_advice(taken, run)])
    return "---\n".join([f"{told}\n", *map(_dump, documents)])


def job_name(name: str) -> str:
    """The name of the Job for that of its file. Raises UsageError for one that is too long."""
    label = re.sub(r"[^a-z0-9]+", "-", checked_name(name).lower()).strip("-")
    if not 0 < len(label) <= _LABEL_MOST:
        raise UsageError(
            "job-name-invalid",
            f"the Job name '{name[:80]}' does not have 1 to {_LABEL_MOST} letters",
            hint="use a shorter -o NAME.yaml",
        )
    return label


def _check_files(files: Mapping[str, bytes]) -> None:
    for name in files:
        if not _KEY.fullmatch(name):
            raise UsageError(
                "file-name-invalid",
                f"{name[:80]!a} cannot be a file name in a ConfigMap",
                hint="use only letters, digits and . _ -",
            )
    size = sum(len(name) + len(data) for name, data in files.items())
    if size > FILES_MOST:
        raise UsageError(
            "job-files-too-large",
            f"the program, inputs and values have {size:,} bytes, but a ConfigMap can hold {FILES_MOST:,}",
            hint="put large inputs into a volume and add it to the manifest",
        )


# --- what runs -----------------------------------------------------------------------------------


def _is_amd(taken: JobImageSpec) -> bool:
    return any(one.capability.processor for one in taken.classes)


def _program(run: SubmitCommand) -> str:
    path = checked_path(run.executable)
    return path if run.in_image else f"./{path.rpartition('/')[2]}"


def _script(taken: JobImageSpec, run: SubmitCommand, rows: Sequence[Sequence[str]]) -> str:
    """What starts the program where it must be told values or look at its GPU; empty where it need not."""
    look = _NODE_LABEL_COMMENT % _versions(taken.classes) if run.gpus and _is_amd(taken) else ""
    if not (run.columns or look):
        return ""
    words = [format_run_argument(word, run.columns, _INDEX) for word in (_program(run), *run.arguments)]
    values = [f"{_INDEX}=$((JOB_COMPLETION_INDEX + 1))", *value_arrays(run, rows)] if run.columns else []
    parts = ["#!/bin/bash", "set -eu", *([look] if look else []), *values, f"exec {' '.join(words)}"]
    return "\n".join([*parts, ""])


def _versions(classes: Iterable[GpuClass]) -> tuple[str, str]:
    """Processors as the kernel writes them (`gfx90a` is 90010), and as people do."""
    numbers = []
    for one in classes:
        found = _GFX.fullmatch(one.capability.processor)
        assert found is not None
        numbers.append(str(int(found[1]) * 10_000 + int(found[2], 16) * 100 + int(found[3], 16)))
    return " | ".join(numbers), ", ".join(str(one.capability) for one in classes)


def _command(run: SubmitCommand, *, script: bool) -> list[str]:
    if script:
        return ["/bin/bash", f"{_SCRIPT_PATH}/{_SCRIPT}"]
    for word in run.arguments:
        if not (word.isascii() and word.isprintable()):
            raise UsageError(
                "argument-not-ascii",
                f"{word[:80]!a} cannot be an argument in a manifest",
                hint="use printable ASCII",
            )
        if re.search(r"\$\([A-Za-z_]", word):
            raise no_macro(word, ())
    # `$$` is a dollar: `$(NAME)` would be filled in by Kubernetes.
    return [word.replace("$", "$$") for word in (_program(run), *run.arguments)]


# --- where it runs -------------------------------------------------------------------------------


def node_terms(classes: Iterable[GpuClass], run: SubmitCommand) -> list[dict[str, Any]]:
    """What a node's labels must say: of these terms one must hold, and all of its expressions.

    One a major capability and driver. CUDA 12.4 or newer is 12 with a minor above 3, or a major above 12.
    """
    groups: dict[tuple[int, str], list[Capability]] = {}
    for one in sorted(classes, key=lambda one: one.capability):
        groups.setdefault((one.capability.major, one.cuda), []).append(one.capability)
    whole = [] if run.mig else [{"key": "nvidia.com/gpu.slices.gi", "operator": "DoesNotExist"}]
    large = (
        [_driver_newer_than("nvidia.com/gpu.memory", -(-run.gpu_memory // MB) - 1)] if run.gpu_memory else []
    )
    return [
        {
            "matchExpressions": [
                _among("nvidia.com/gpu.compute.major", [major]),
                _among("nvidia.com/gpu.compute.minor", [one.minor for one in capabilities]),
                *driver,
                *large,
                *whole,
            ]
        }
        for (major, cuda), capabilities in groups.items()
        for driver in _drivers(cuda)
    ]


def _drivers(cuda: str) -> list[list[dict[str, Any]]]:
    if not cuda:
        return [[]]
    major, minor = (int(part) for part in cuda.split("."))
    # Called cuda.runtime-version.* too since 0.16; this name all versions have so far.
    whole, part = "nvidia.com/cuda.runtime.major", "nvidia.com/cuda.runtime.minor"
    if not minor:
        return [[_driver_newer_than(whole, major - 1)]]
    return [[_among(whole, [major]), _driver_newer_than(part, minor - 1)], [_driver_newer_than(whole, major)]]


def _among(key: str, numbers: Iterable[int]) -> dict[str, Any]:
    return {"key": key, "operator": "In", "values": [str(number) for number in numbers]}


def _driver_newer_than(key: str, number: int) -> dict[str, Any]:
    return {"key": key, "operator": "Gt", "values": [str(number)]}


def _advice(taken: JobImageSpec, run: SubmitCommand) -> list[str]:
    lines = ["# Results stay in the pod: add a volume for them. Its output: kubectl logs job/NAME"]
    if run.gpus and not _is_amd(taken):
        labels = "nvidia.com/gpu.product,nvidia.com/gpu.compute.major,nvidia.com/cuda.runtime.major"
        lines.append(f"# Nodes need the labels of GPU feature discovery: kubectl get nodes -L {labels}")
    return lines


# --- the documents -------------------------------------------------------------------------------


def _config_map(name: str, files: Mapping[str, bytes]) -> dict[str, Any]:
    texts, bytes_ = {}, {}
    for key, data in sorted(files.items()):
        try:
            texts[key] = data.decode()
        except UnicodeDecodeError:
            bytes_[key] = base64.b64encode(data).decode()
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": name},
        **({"data": texts} if texts else {}),
        **({"binaryData": bytes_} if bytes_ else {}),
    }


def _job(
    name: str, taken: JobImageSpec, run: SubmitCommand, files: Sequence[str], runs: int
) -> dict[str, Any]:
    """One try each: what failed is for a person to look at. A pod that its node drops is tried again."""
    tries: dict[str, Any] = {"backoffLimit": 0}
    if run.columns:
        tries = {
            "completionMode": "Indexed",
            "completions": runs,
            "parallelism": runs,
            "backoffLimitPerIndex": 0,
        }
    dropped = {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": name},
        "spec": {
            **tries,
            "podFailurePolicy": {"rules": [dropped]},
            "template": {"spec": _pod(name, taken, run, files)},
        },
    }


def _pod(name: str, taken: JobImageSpec, run: SubmitCommand, files: Sequence[str]) -> dict[str, Any]:
    if taken.platform not in ARCHITECTURES:
        raise UsageError(
            "platform-unsupported",
            f"unsupported platform '{taken.platform[:40]}'",
            hint=f"supported platforms: {', '.join(ARCHITECTURES)}",
        )
    volumes: list[dict[str, Any]] = [
        {"name": "work", "emptyDir": {}},
        {"name": "shm", "emptyDir": {"medium": "Memory"}},
    ]
    mounts: list[dict[str, Any]] = [
        {"name": "work", "mountPath": _SCRIPT_PATH},
        {"name": "shm", "mountPath": "/dev/shm"},  # noqa: S108  # the pod's own
    ]
    if files:
        volumes.append({"name": "files", "configMap": {"name": name, "defaultMode": 0o755}})
        mounts += [{"name": "files", "mountPath": f"{_SCRIPT_PATH}/{key}", "subPath": key} for key in files]
    pod: dict[str, Any] = {
        "restartPolicy": "Never",
        "automountServiceAccountToken": False,
        "nodeSelector": {"kubernetes.io/arch": taken.platform.removeprefix("linux/")},
    }
    if run.time:
        pod["activeDeadlineSeconds"] = max(1, int(run.time.total_seconds()))
    if run.gpus and not _is_amd(taken):
        terms = {"nodeSelectorTerms": node_terms(taken.classes, run)}
        pod["affinity"] = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": terms}}
    if run.gpus:
        resource = AMD if _is_amd(taken) else NVIDIA
        pod["tolerations"] = [{"key": resource, "operator": "Exists", "effect": "NoSchedule"}]
    pod["containers"] = [
        {
            "name": "job",
            "image": checked_address(taken.form.image.address).removeprefix("docker://"),
            "command": _command(run, script=_SCRIPT in files),
            "workingDir": _SCRIPT_PATH,
            "env": [{"name": "PYTHONNOUSERSITE", "value": "1"}],
            "resources": _resources(taken, run),
            "volumeMounts": mounts,
        }
    ]
    return {**pod, "volumes": volumes}


def _resources(taken: JobImageSpec, run: SubmitCommand) -> dict[str, Any]:
    memory, _ = requested_resources(taken.form.image, run)
    amounts = {"memory": _mebibytes(memory)}
    if run.disk:
        amounts["ephemeral-storage"] = _mebibytes(run.disk)
    gpus = {(AMD if _is_amd(taken) else NVIDIA): str(run.gpus)} if run.gpus else {}
    return {"limits": {**gpus, **amounts}, "requests": {"cpu": str(run.cpus), **amounts}}


def _mebibytes(size: int) -> str:
    return f"{-(-size // MB)}Mi"


class _Dumper(yaml.SafeDumper):
    """Texts of several lines as blocks, and nothing by reference."""

    def ignore_aliases(self, _data: Any) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _text)


def _dump(document: Mapping[str, Any]) -> str:
    made: str = yaml.dump(document, Dumper=_Dumper, sort_keys=False, width=110)
    return made
