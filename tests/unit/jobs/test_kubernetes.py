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
from imagefactory.jobs.htcondor import JobImageSpec, SubmitCommand
from imagefactory.jobs.kubernetes import FILES_MOST, format_manifest, node_terms
from imagefactory.jobs.make import first_trial, read_files
from imagefactory.jobs.offer import GpuClass, choose_form, forms_of
from imagefactory.schedulers.sites import find_site
from imagefactory.schedulers.sizes import GB
from tests.made.offers import IMAGE, NOW, REFERENCE, gpu_class, offer

SCHEMA = jsonschema.Draft202012Validator(
    json.loads((Path(__file__).parents[2] / "data/kubernetes_job.json").read_text())
)
RUN = SubmitCommand(name="train", executable="code/train.sh")
SWEEP = replace(RUN, columns=("run", "lr", "name"), arguments=("$(run)", "x$(LR)", "$(name)"))
FILES = {"train.sh": b"#!/bin/sh\necho hi\n"}
MI300 = GpuClass(capability=parse_capability("gfx90a"), cuda="", claim=gpu_class("8.0").claim)


def taken(*classes: GpuClass) -> JobImageSpec:
    form = choose_form(forms_of(offer(), ""), find_site("kubernetes"), None)
    return JobImageSpec(
        target=IMAGE.target,
        platform=IMAGE.platform,
        form=form,
        classes=classes or (gpu_class("8.0"),),
        judged=NOW,
    )


def documents(text: str) -> list[dict[str, Any]]:
    found = [one for one in yaml.safe_load_all(text) if one]
    for document in found:
        SCHEMA.validate(document)
    return found


def job(
    run: SubmitCommand = RUN, *classes: GpuClass, rows: Any = (), files: Mapping[str, bytes] = FILES
) -> Any:
    return documents(format_manifest(taken(*classes), run, rows, files))[-1]["spec"]


# --- what stands there -----------------------------------------------------------------------------


def test_a_job_is_what_the_api_takes() -> None:
    run = replace(
        RUN, gpus=2, cpus=4, memory=20 * GB, disk=5 * GB, time=timedelta(hours=2), arguments=("a b",)
    )
    text = format_manifest(taken(), run, (), {**FILES, "data.npy": b"\xff\x00"})
    assert text.startswith(f"# {IMAGE.target}, manifest {IMAGE.subject.manifest}\n")
    files, made = documents(text)
    assert files["data"] == {"train.sh": "#!/bin/sh\necho hi\n"}
    assert files["binaryData"] == {"data.npy": "/wA="}
    spec = made["spec"]
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]
    assert (made["metadata"]["name"], spec["backoffLimit"], pod["restartPolicy"]) == ("train", 0, "Never")
    assert pod["activeDeadlineSeconds"] == 7200
    assert pod["nodeSelector"] == {"kubernetes.io/arch": "amd64"}
    assert container["image"] == REFERENCE
    assert container["command"] == ["./train.sh", "a b"]
    amounts = {"memory": "20480Mi", "ephemeral-storage": "5120Mi"}
    assert container["resources"] == {
        "limits": {"nvidia.com/gpu": "2", **amounts},
        "requests": {"cpu": "4", **amounts},
    }
    seen = {one["mountPath"] for one in container["volumeMounts"]}
    folder = "/work"  # in the pod
    assert seen == {folder, "/dev/shm", f"{folder}/train.sh", f"{folder}/data.npy"}
    assert {one["name"] for one in container["volumeMounts"]} == {one["name"] for one in pod["volumes"]}


def test_without_a_program_the_image_says_what_it_sees() -> None:
    run = first_trial(SubmitCommand(name="pytorch-2.3-cu121", executable=""), "torch")
    (made,) = documents(format_manifest(taken(), run, (), {}))
    assert made["metadata"]["name"] == "pytorch-2-3-cu121"
    command = made["spec"]["template"]["spec"]["containers"][0]["command"]
    assert command[0].endswith("/bin/python")
    assert "torch.cuda.get_device_name()" in command[2]


def test_a_job_on_cpus_asks_for_no_gpu() -> None:
    text = format_manifest(taken(), replace(RUN, gpus=0), (), FILES)
    assert "nvidia" not in text
    assert "affinity" not in documents(text)[-1]["spec"]["template"]["spec"]


def test_a_dollar_of_an_argument_is_one() -> None:
    pod = job(replace(RUN, arguments=("$HOME", "100$")))["template"]["spec"]
    assert pod["containers"][0]["command"][1:] == ["$$HOME", "100$$"]


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
    """As the scheduler reads a term: all of its expressions hold."""
    return all(
        {
            "In": lambda one: node.get(one["key"]) in one["values"],
            "Gt": lambda one: one["key"] in node and int(node[one["key"]]) > int(one["values"][0]),
            "DoesNotExist": lambda one: one["key"] not in node,
        }[one["operator"]](one)
        for one in term["matchExpressions"]
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
    terms = node_terms(classes, replace(RUN, gpu_memory=24 * GB))
    assert any(takes(term, node) for term in terms) == fits
    pod = job(replace(RUN, gpu_memory=24 * GB), *classes)["template"]["spec"]
    required = pod["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert required["nodeSelectorTerms"] == terms
    assert all(isinstance(value, str) for term in terms for one in term["matchExpressions"]
               for value in one.get("values", ()))  # fmt: skip


def test_slices_are_taken_where_they_are_asked_for() -> None:
    node = labels("8.0", "12.4", 10240, **{"nvidia.com/gpu.slices.gi": "1"})
    assert any(takes(term, node) for term in node_terms((gpu_class("8.0"),), replace(RUN, mig=True)))


# --- what a shell makes of it ------------------------------------------------------------------------


def run_carried(folder: Path, text: str, index: int = 0, sys: str = "") -> tuple[int, str]:
    """Runs what a manifest carries, as its container would."""
    files, made = documents(text)
    for name, data in files["data"].items():
        (folder / name).write_text(data.replace("/sys/class/kfd", sys) if sys else data)
        (folder / name).chmod(0o755)
    command = made["spec"]["template"]["spec"]["containers"][0]["command"]
    done = subprocess.run(
        [word.replace("/work", str(folder)) for word in command],
        cwd=folder,
        env={"PATH": "/usr/bin:/bin", "JOB_COMPLETION_INDEX": str(index)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


SAYS = {"train.sh": b'#!/bin/sh\nprintf "%s\\n" "$@"\n'}


def test_each_run_of_a_sweep_has_its_values(tmp_path: Path) -> None:
    rows = tuple((f"0.{number}", f"b c{number}") for number in range(40))
    text = format_manifest(taken(), SWEEP, rows, SAYS)
    spec = documents(text)[-1]["spec"]
    assert (spec["completionMode"], spec["completions"], spec["backoffLimitPerIndex"]) == ("Indexed", 40, 0)
    for index in (0, 39):
        code, said = run_carried(tmp_path, text, index)
        assert code == 0, said
        assert said.splitlines() == [str(index + 1), f"x0.{index}", f"b c{index}"]


@pytest.mark.parametrize(("version", "code"), [("90010", 0), ("90402", 9)])
def test_on_amd_a_processor_that_is_not_proven_stops_the_job(tmp_path: Path, version: str, code: int) -> None:
    for node, told in (("0", "0"), ("1", version)):
        (tmp_path / f"kfd/kfd/topology/nodes/{node}").mkdir(parents=True)
        properties = f"simd_count 4\ngfx_target_version {told}\n"
        (tmp_path / f"kfd/kfd/topology/nodes/{node}/properties").write_text(properties)
    text = format_manifest(taken(MI300), replace(RUN, arguments=("a",)), (), SAYS)
    limits = documents(text)[-1]["spec"]["template"]["spec"]["containers"][0]["resources"]["limits"]
    assert limits["amd.com/gpu"] == "1"
    assert "nvidia" not in text
    ended, said = run_carried(tmp_path, text, sys=str(tmp_path / "kfd"))
    assert ended == code, said
    assert ("the image is proven on gfx90a" in said) == (code == 9)


# --- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "rows", "files", "code", "said"),
    [
        ({"outputs": ("model.pt",)}, (), FILES, "option-conflict", "--output-file"),
        ({"checkpoint": "last.pt"}, (), FILES, "option-conflict", "--checkpoint"),
        ({"gather": "gather.py"}, (), FILES, "option-conflict", "--finalize"),
        ({"name": "a" * 60}, (), FILES, "job-name-invalid", "1 to 52 letters"),
        ({"name": "a b"}, (), FILES, "submit-value-invalid", "'a b'"),
        ({"executable": "a;b"}, (), FILES, "submit-value-invalid", "'a;b'"),
        ({"arguments": ("$(lr)",)}, (), FILES, "macro-unknown", "'$(lr)'"),
        ({"arguments": ("a\nb",)}, (), FILES, "argument-not-ascii", r"'a\nb'"),
        ({"columns": ("run", "lr")}, (("1", "2"),), FILES, "sweep-values-invalid", "run 1 has 2 values"),
        ({"columns": ("run", "lr")}, (("`id`",),), FILES, "sweep-values-invalid", "'`id`'"),
        ({}, (), {"a b": b""}, "file-name-invalid", "'a b'"),
        ({}, (), {"a": b"x" * FILES_MOST}, "job-files-too-large", "1,000,000"),
    ],
)  # fmt: skip
def test_what_cannot_be_done_is_refused(
    changes: dict[str, Any], rows: Any, files: Mapping[str, bytes], code: str, said: str
) -> None:
    with pytest.raises(UsageError) as caught:
        format_manifest(taken(), replace(RUN, **changes), rows, files)
    assert caught.value.code == code
    assert said in caught.value.message
    assert caught.value.hint


def test_files_are_read_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "code").mkdir()
    (tmp_path / "code/train.sh").write_bytes(b"a")
    (tmp_path / "train.sh").write_bytes(b"b")
    assert read_files(RUN) == {"train.sh": b"a"}
    for inputs, code, said in (
        (("train.sh",), "file-name-duplicate", "train.sh"),
        (("code",), "cannot-read-file", "code: is a directory"),
        (("no.csv",), "cannot-read-file", "no.csv: no such file"),
        (("https://example.org/x",), "option-conflict", "https://example.org/x"),
    ):
        with pytest.raises(UsageError) as caught:
            read_files(replace(RUN, inputs=inputs))
        assert caught.value.code == code
        assert said in caught.value.message


NASTY = [*"aB1 \n\r\\$(){}\"',;=#+-*/.~|&<>%@\t:!?[]", "---", "null", "image: x"]


def test_no_value_becomes_another_field() -> None:
    """Whatever stands in an argument or a file, the documents have the fields that they have."""
    random = Random(7)
    made = 0
    for _ in range(300):
        value = "".join(random.choices(NASTY, k=random.randint(1, 6)))
        try:
            text = format_manifest(taken(), replace(RUN, arguments=(value,)), (), {"x": value.encode()})
        except UsageError:
            continue
        made += 1
        files, spec = documents(text)
        assert files["data"] == {"x": value}
        assert spec["spec"]["template"]["spec"]["containers"][0]["command"][1] == value.replace("$", "$$")
    assert made > 30
