"""Write the manifest of a Kubernetes Job. Pure functions.

Labels of NVIDIA GPU feature discovery select the nodes: capability, memory, and the newest CUDA version that
the driver supports. No label has the processor of an AMD GPU, so the job checks it when it starts. The
program and its inputs are in a ConfigMap, which is limited to 1 MiB. Sources: Kubernetes API, batch/v1 Job;
NVIDIA k8s-device-plugin, "GPU Feature Discovery", Generated Labels; Linux, amdkfd topology in /sys.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import yaml

from imagefactory.errors import UsageError
from imagefactory.gpu.capability import Capability
from imagefactory.jobs.offer import GpuClass
from imagefactory.jobs.spec import JobSpec, format_run_argument, header, value_arrays
from imagefactory.schedulers.sizes import MB

SUFFIX = ".yaml"
FILES_MOST = 1_000_000
"""The limit of file bytes in a ConfigMap, whose limit of 1 MiB includes other fields."""
NVIDIA, AMD = "nvidia.com/gpu", "amd.com/gpu"
_SCRIPT_PATH, _SCRIPT = "/work", "imagefactory-run.sh"
_INDEX = "run"
_KEY = re.compile(r"[-._A-Za-z0-9]{1,200}")
_LABEL_MOST = 52
"""The limit of characters in the name of a Job.

A pod name has 63: that name, its index and a random suffix.
"""
_GFX = re.compile(r"gfx([0-9]{1,2})([0-9a-f])([0-9a-f])")
_AMD_CHECK = """\
# No label of a node has the processor of its GPUs. So this checks that the image is verified on them.
for version in $(sed -n 's/^gfx_target_version //p' /sys/class/kfd/kfd/topology/nodes/*/properties); do
    case $version in
    0 | %s) ;;
    *)
        echo "this node has a GPU of version $version, but the image is verified on %s" >&2
        exit 9
        ;;
    esac
done"""


def write_kubernetes(spec: JobSpec) -> dict[str, str]:
    """Return the manifest by file name. Raises UsageError for an unsupported name or file."""
    name = re.sub(r"[^a-z0-9]+", "-", spec.name.lower()).strip("-")
    if not 0 < len(name) <= _LABEL_MOST:
        raise UsageError(
            "job-name-invalid",
            f"the Job name '{spec.name[:80]}' must have 1 to {_LABEL_MOST} letters",
            hint="pass a shorter name: -o NAME.yaml",
        )
    script = _format_script(spec)
    files = {**spec.files, **({_SCRIPT: script.encode()} if script else {})}
    _check_files(files)
    comments = [
        *header(spec),
        "# Results stay in the pod: add a volume for them. Its output: kubectl logs job/NAME",
    ]
    if spec.gpus and not _is_amd(spec):
        labels = "nvidia.com/gpu.product,nvidia.com/gpu.compute.major,nvidia.com/cuda.runtime.major"
        comments.append(f"# Nodes need the labels of GPU feature discovery: kubectl get nodes -L {labels}")
    documents = [_config_map(name, files)] if files else []
    documents.append(_job(name, spec, [*files]))
    texts = (yaml.dump(document, Dumper=_Dumper, sort_keys=False, width=110) for document in documents)
    return {f"{spec.name}{SUFFIX}": "---\n".join(["\n".join([*comments, ""]), *texts])}


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
            f"program, inputs and values have {size:,} bytes, but the limit of a ConfigMap is {FILES_MOST:,}",
            hint="put large inputs into a volume and add it to the manifest",
        )


def _is_amd(spec: JobSpec) -> bool:
    return any(gpu_class.capability.processor for gpu_class in spec.classes)


def _words(spec: JobSpec) -> tuple[str, ...]:
    name = spec.executable.rpartition("/")[2]
    return spec.executable if spec.in_image else f"./{name}", *spec.arguments


def _format_script(spec: JobSpec) -> str:
    """Return the script that inserts values of a sweep or checks an AMD GPU, "" if neither is needed."""
    check = [_AMD_CHECK % _versions(spec.classes)] if spec.gpus and _is_amd(spec) else []
    if not (spec.columns or check):
        return ""
    words = [format_run_argument(word, spec, _INDEX) for word in _words(spec)]
    values = [f"{_INDEX}=$((JOB_COMPLETION_INDEX + 1))", *value_arrays(spec)] if spec.columns else []
    return "\n".join(["#!/bin/bash", "set -eu", *check, *values, f"exec {' '.join(words)}", ""])


def _versions(classes: Iterable[GpuClass]) -> tuple[str, str]:
    """Return processors in the format of the kernel (90010), each with its usual name (`gfx90a`)."""
    versions = []
    for gpu_class in classes:
        match = _GFX.fullmatch(gpu_class.capability.processor)
        assert match is not None
        versions.append(str(int(match[1]) * 10_000 + int(match[2], 16) * 100 + int(match[3], 16)))
    return " | ".join(versions), ", ".join(str(gpu_class.capability) for gpu_class in classes)


def node_terms(spec: JobSpec) -> list[dict[str, Any]]:
    """Return terms on node labels. A node must match all expressions of at least one term.

    A term has one major capability and one driver. CUDA 12.4 or newer is written as major 12 with a minor
    above 3, or a major above 12.
    """
    groups: dict[tuple[int, str], list[Capability]] = {}
    for gpu_class in sorted(spec.classes, key=lambda gpu_class: gpu_class.capability):
        key = gpu_class.capability.major, gpu_class.cuda
        groups.setdefault(key, []).append(gpu_class.capability)
    more = [_above("nvidia.com/gpu.memory", -(-spec.gpu_memory // MB) - 1)] if spec.gpu_memory else []
    more += [] if spec.mig else [{"key": "nvidia.com/gpu.slices.gi", "operator": "DoesNotExist"}]
    return [
        {
            "matchExpressions": [
                _among("nvidia.com/gpu.compute.major", [major]),
                _among("nvidia.com/gpu.compute.minor", [capability.minor for capability in capabilities]),
                *driver,
                *more,
            ]
        }
        for (major, cuda), capabilities in groups.items()
        for driver in _drivers(cuda)
    ]


def _drivers(cuda: str) -> list[list[dict[str, Any]]]:
    if not cuda:
        return [[]]
    major, minor = (int(part) for part in cuda.split("."))
    # Since 0.16 also cuda.runtime-version.*; all versions so far have this name.
    whole, part = "nvidia.com/cuda.runtime.major", "nvidia.com/cuda.runtime.minor"
    if not minor:
        return [[_above(whole, major - 1)]]
    return [[_among(whole, [major]), _above(part, minor - 1)], [_above(whole, major)]]


def _among(key: str, numbers: Iterable[int]) -> dict[str, Any]:
    return {"key": key, "operator": "In", "values": [str(number) for number in numbers]}


def _above(key: str, number: int) -> dict[str, Any]:
    return {"key": key, "operator": "Gt", "values": [str(number)]}


def _config_map(name: str, files: Mapping[str, bytes]) -> dict[str, Any]:
    texts, binaries = {}, {}
    for key, data in sorted(files.items()):
        try:
            texts[key] = data.decode()
        except UnicodeDecodeError:
            binaries[key] = base64.b64encode(data).decode()
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": name},
        **({"data": texts} if texts else {}),
        **({"binaryData": binaries} if binaries else {}),
    }


def _job(name: str, spec: JobSpec, files: Sequence[str]) -> dict[str, Any]:
    """Return a Job that retries pods lost with their node.

    It does not retry failures, so that a person sees them.
    """
    runs = len(spec.rows)
    tries: dict[str, Any] = {"backoffLimit": 0}
    if spec.columns:
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
            "template": {"spec": _pod(name, spec, files)},
        },
    }


def _pod(name: str, spec: JobSpec, files: Sequence[str]) -> dict[str, Any]:
    resource = AMD if _is_amd(spec) else NVIDIA
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
        "nodeSelector": {"kubernetes.io/arch": spec.platform.removeprefix("linux/")},
    }
    if spec.time:
        pod["activeDeadlineSeconds"] = max(1, int(spec.time.total_seconds()))
    if spec.gpus and not _is_amd(spec):
        terms = {"nodeSelectorTerms": node_terms(spec)}
        pod["affinity"] = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": terms}}
    if spec.gpus:
        pod["tolerations"] = [{"key": resource, "operator": "Exists", "effect": "NoSchedule"}]
    amounts = {"memory": _mebibytes(spec.requested_memory)}
    if spec.disk:
        amounts["ephemeral-storage"] = _mebibytes(spec.disk)
    gpus = {resource: str(spec.gpus)} if spec.gpus else {}
    # `$$` is a dollar: Kubernetes would fill in `$(NAME)`.
    command = [word.replace("$", "$$") for word in _words(spec)]
    pod["containers"] = [
        {
            "name": "job",
            "image": spec.image.address.removeprefix("docker://"),
            "command": ["/bin/bash", f"{_SCRIPT_PATH}/{_SCRIPT}"] if _SCRIPT in files else command,
            "workingDir": _SCRIPT_PATH,
            "env": [{"name": "PYTHONNOUSERSITE", "value": "1"}],
            "resources": {
                "limits": {**gpus, **amounts},
                "requests": {"cpu": str(spec.cpus), **amounts},
            },
            "volumeMounts": mounts,
        }
    ]
    return {**pod, "volumes": volumes}


def _mebibytes(size: int) -> str:
    return f"{-(-size // MB)}Mi"


class _Dumper(yaml.SafeDumper):
    """A YAML dumper that writes texts of several lines as blocks and uses no references."""

    def ignore_aliases(self, _data: Any) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _text)
