"""Manifests for Kubernetes: by the API's schema, by nodes' labels, and as a shell runs what is carried."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from random import Random
from typing import Any

import jsonschema
import pytest
import yaml

from imagefactory.errors import UsageError
from imagefactory.gpu.capability import parse_capability
from imagefactory.jobs.kubernetes import FILES_MOST, node_terms, write_kubernetes
from imagefactory.jobs.make import read_files, resolve_job
from imagefactory.jobs.offer import GpuClass
from imagefactory.jobs.spec import JobParameters
from imagefactory.schedulers.sites import find_site
from imagefactory.schedulers.sizes import GB
from tests.made.errors import fails
from tests.made.offers import IMAGE, NOW, REFERENCE, gpu_class, job_spec, offer, verdict
from tests.made.verdicts import TRUST
from tests.services.tier import many

SCHEMA = jsonschema.Draft202012Validator(
    json.loads((Path(__file__).parents[2] / "data/kubernetes_job.json").read_text())
)
FILES = {"train.sh": b"#!/bin/sh\necho hi\n"}
MI300 = GpuClass(capability=parse_capability("gfx90a"), cuda="", claim=gpu_class("8.0").claim)


def manifest(*capabilities: str, **changes: Any) -> str:
    fields = {"executable": "code/train.sh", "files": FILES, **changes}
    (text,) = write_kubernetes(job_spec(*capabilities, site="kubernetes", **fields)).values()
    return text


def documents(text: str) -> list[dict[str, Any]]:
    values = [value for value in yaml.safe_load_all(text) if value]
    for document in values:
        SCHEMA.validate(document)
    return values


def pod_of(text: str) -> Any:
    return documents(text)[-1]["spec"]["template"]["spec"]


def test_a_job_is_what_the_api_takes() -> None:
    text = manifest(
        gpus=2,
        cpus=4,
        memory=20 * GB,
        disk=5 * GB,
        time=timedelta(hours=2),
        arguments=("a b",),
        files={**FILES, "data.npy": b"\xff\x00"},
    )
    assert text.startswith(f"# {IMAGE.target}, manifest {IMAGE.subject.manifest}\n")
    files, job = documents(text)
    assert files["data"] == {"train.sh": "#!/bin/sh\necho hi\n"}
    assert files["binaryData"] == {"data.npy": "/wA="}
    spec = job["spec"]
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]
    assert (job["metadata"]["name"], spec["backoffLimit"], pod["restartPolicy"]) == ("train", 0, "Never")
    assert pod["activeDeadlineSeconds"] == 7200
    assert pod["nodeSelector"] == {"kubernetes.io/arch": "amd64"}
    assert container["image"] == REFERENCE
    assert container["command"] == ["./train.sh", "a b"]
    amounts = {"memory": "20480Mi", "ephemeral-storage": "5120Mi"}
    assert container["resources"] == {
        "limits": {"nvidia.com/gpu": "2", **amounts},
        "requests": {"cpu": "4", **amounts},
    }
    paths = {mount["mountPath"] for mount in container["volumeMounts"]}
    folder = "/work"  # in the pod
    assert paths == {folder, "/dev/shm", f"{folder}/train.sh", f"{folder}/data.npy"}
    assert {mount["name"] for mount in container["volumeMounts"]} == {row["name"] for row in pod["volumes"]}


def test_without_a_program_the_image_says_what_it_sees() -> None:
    request = JobParameters(target=IMAGE.target, site=find_site("kubernetes"))
    (text,) = write_kubernetes(resolve_job(offer(verdict("8.0")), request, TRUST, NOW)).values()
    (job,) = documents(text)
    assert job["metadata"]["name"] == "pytorch-2-3-cu121"
    command = pod_of(text)["containers"][0]["command"]
    assert command[0].endswith("/bin/python")
    assert "torch.cuda.get_device_name()" in command[2]


def test_a_job_on_cpus_asks_for_no_gpu() -> None:
    text = manifest(gpus=0)
    assert "nvidia" not in text
    assert "affinity" not in pod_of(text)


def test_a_dollar_of_an_argument_is_one() -> None:
    command = pod_of(manifest(arguments=("$HOME", "100$")))["containers"][0]["command"]
    assert command[1:] == ["$$HOME", "100$$"]


# --- where it runs -------------------------------------------------------------------------------


def labels(capability: str, cuda: str, memory: int = 81920, **more: str) -> dict[str, str]:
    major, _, minor = capability.partition(".")
    whole, _, part = cuda.partition(".")
    return {
        "nvidia.com/gpu.compute.major": major,
        "nvidia.com/gpu.compute.minor": minor,
        "nvidia.com/cuda.runtime.major": whole,
        "nvidia.com/cuda.runtime.minor": part,
        "nvidia.com/gpu.memory": str(memory),
        **more,
    }


def takes(term: Mapping[str, Any], node: Mapping[str, str]) -> bool:
    """Return whether all expressions of a term are true, as the scheduler reads it."""
    return all(
        {
            "In": lambda row: node.get(row["key"]) in row["values"],
            "Gt": lambda row: row["key"] in node and int(node[row["key"]]) > int(row["values"][0]),
            "DoesNotExist": lambda row: row["key"] not in node,
        }[row["operator"]](row)
        for row in term["matchExpressions"]
    )


@pytest.mark.parametrize(
    ("node", "fits"),
    [
        (labels("8.0", "12.4"), True),
        (labels("8.0", "12.8"), True),
        (labels("8.0", "13.0"), True),
        (labels("8.0", "12.3"), False),
        (labels("8.0", "11.8"), False),
        (labels("8.6", "12.4"), True),
        (labels("8.9", "12.4"), False),
        (labels("9.0", "12.4"), False),
        (labels("9.0", "13.0"), True),
        (labels("9.0", "13.2"), True),
        (labels("9.6", "13.2"), False),
        (labels("8.0", "12.4", 24575), False),
        (labels("8.0", "12.4", 10240, **{"nvidia.com/gpu.slices.gi": "1"}), False),
        ({}, False),
    ],
)  # fmt: skip
def test_nodes_are_those_where_it_is_proven(node: Mapping[str, str], fits: bool) -> None:
    classes = (gpu_class("8.0", "12.4"), gpu_class("8.6", "12.4"), gpu_class("9.0", "13.0"))
    changes: dict[str, Any] = {"classes": classes, "gpu_memory": 24 * GB}
    terms = node_terms(job_spec(site="kubernetes", **changes))
    assert any(takes(term, node) for term in terms) == fits
    required = pod_of(manifest(**changes))["affinity"]["nodeAffinity"][
        "requiredDuringSchedulingIgnoredDuringExecution"
    ]
    assert required["nodeSelectorTerms"] == terms
    rows = [row for term in terms for row in term["matchExpressions"]]
    assert all(isinstance(value, str) for row in rows for value in row.get("values", ()))


def test_slices_are_taken_where_they_are_asked_for() -> None:
    node = labels("8.0", "12.4", 10240, **{"nvidia.com/gpu.slices.gi": "1"})
    terms = node_terms(job_spec(site="kubernetes", mig=True))
    assert any(takes(term, node) for term in terms)


# --- what a shell makes of it ------------------------------------------------------------------------


def run_carried(folder: Path, text: str, index: int = 0, sys: str = "") -> tuple[int, str]:
    """Runs what a manifest carries, as its container would."""
    files, job = documents(text)
    for name, data in files["data"].items():
        (folder / name).write_text(data.replace("/sys/class/kfd", sys) if sys else data)
        (folder / name).chmod(0o755)
    command = job["spec"]["template"]["spec"]["containers"][0]["command"]
    ended = subprocess.run(
        [word.replace("/work", str(folder)) for word in command],
        cwd=folder,
        env={"PATH": "/usr/bin:/bin", "JOB_COMPLETION_INDEX": str(index)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return ended.returncode, ended.stdout + ended.stderr


SAYS = {"train.sh": b'#!/bin/sh\nprintf "%s\\n" "$@"\n'}


def test_each_run_of_a_sweep_has_its_values(tmp_path: Path) -> None:
    rows = tuple((f"0.{number}", f"b c{number}") for number in range(40))
    arguments = ("$(run)", "x$(LR)", "$(name)")
    text = manifest(columns=("run", "lr", "name"), rows=rows, arguments=arguments, files=SAYS)
    spec = documents(text)[-1]["spec"]
    assert (spec["completionMode"], spec["completions"], spec["backoffLimitPerIndex"]) == ("Indexed", 40, 0)
    for index in (0, 39):
        code, output = run_carried(tmp_path, text, index)
        assert code == 0, output
        assert output.splitlines() == [str(index + 1), f"x0.{index}", f"b c{index}"]


@pytest.mark.parametrize(("version", "code"), [("90010", 0), ("90402", 9)])
def test_on_amd_a_processor_that_is_not_proven_stops_the_job(tmp_path: Path, version: str, code: int) -> None:
    for node, target in (("0", "0"), ("1", version)):
        (tmp_path / f"kfd/kfd/topology/nodes/{node}").mkdir(parents=True)
        properties = f"simd_count 4\ngfx_target_version {target}\n"
        (tmp_path / f"kfd/kfd/topology/nodes/{node}/properties").write_text(properties)
    text = manifest(classes=(MI300,), arguments=("a",), files=SAYS)
    limits = pod_of(text)["containers"][0]["resources"]["limits"]
    assert limits["amd.com/gpu"] == "1"
    assert "nvidia" not in text
    ended, output = run_carried(tmp_path, text, sys=str(tmp_path / "kfd"))
    assert ended == code, output
    assert ("the image is verified on gfx90a" in output) == (code == 9)


# --- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "code", "message"),
    [
        ({"name": "a" * 60}, "job-name-invalid", "1 to 52 letters"),
        ({"files": {"a b": b""}}, "file-name-invalid", "'a b'"),
        ({"files": {"a": b"x" * FILES_MOST}}, "job-files-too-large", "1,000,000"),
    ],
)
def test_files_that_a_manifest_cannot_have(changes: dict[str, Any], code: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        manifest(**changes)
    assert caught.value.code == code
    assert message in caught.value.message
    assert caught.value.hint


def test_files_are_read_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "code").mkdir()
    (tmp_path / "code/train.sh").write_bytes(b"a")
    (tmp_path / "train.sh").write_bytes(b"b")
    request = JobParameters(target="", site=find_site("kubernetes"), executable="code/train.sh")
    assert read_files(request) == {"train.sh": b"a"}
    for inputs, code, message in (
        (("train.sh",), "file-name-duplicate", "train.sh"),
        (("code",), "cannot-read-file", "code: is a directory"),
        (("no.csv",), "cannot-read-file", "no.csv: no such file"),
        (("https://example.org/x",), "option-conflict", "https://example.org/x"),
    ):
        with fails(code, message=message):
            read_files(replace(request, inputs=inputs))


NASTY = [*"aB1 \n\r\\$(){}\"',;=#+-*/.~|&<>%@\t:!?[]", "---", "null", "image: x"]


def test_no_value_becomes_another_field() -> None:
    """Whatever stands in an argument or a file, the documents have the fields that they have."""
    random = Random(7)
    count = 0
    for _ in range(many(100, 1000)):
        value = "".join(random.choices(NASTY, k=random.randint(1, 6)))
        try:
            text = manifest(arguments=(value,), files={"x": value.encode()})
        except UsageError:
            continue
        count += 1
        assert documents(text)[0]["data"] == {"x": value}
        assert pod_of(text)["containers"][0]["command"][1] == value.replace("$", "$$")
    assert count > 10
