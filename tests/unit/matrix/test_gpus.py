"""gpus.yaml: what a person has, and where it says nonsense."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from imagefactory.errors import RecipeError
from imagefactory.gpu.capability import Capability
from imagefactory.matrix.gpus import parse_gpus

GOOD = """\
# The cluster
- name: Tesla V100-SXM2-32GB
  driver: 535.129.03
  count: 4
- capability: 8.6
- name: our new box
  capability: "12.0"
  driver: "580"
- RTX 5090
- {name: NVIDIA H100 NVL, driver: 535}
"""


def test_names_capabilities_drivers_and_counts(tmp_path: Path) -> None:
    file = tmp_path / "gpus.yaml"
    file.write_text(GOOD)
    told = [
        (gpu.name, str(gpu.capability), gpu.driver, gpu.count, gpu.where.line)
        for gpu in parse_gpus(file.read_text(), str(file))
    ]
    assert told == [
        ("V100", "7.0", "535.129.03", 4, 2),
        ("capability 8.6", "8.6", "", 1, 5),
        ("our new box", "12.0", "580", 1, 6),
        ("RTX 5090", "12.0", "", 1, 9),
        ("H100", "9.0", "535", 1, 10),
    ]


@pytest.mark.parametrize(
    ("text", "fault", "write"),
    [
        (
            "- name: RTX 6000",
            "1:9: 'RTX 6000' matches GPUs of different compute capabilities",
            "RTX 6000 Ada (8.9)",
        ),
        ("- name: V10", "1:9: unknown GPU 'V10'", "did you mean V100"),
        ("- V10", "1:3: unknown GPU 'V10'", "did you mean V100"),
        ("- 8.6", "1:3: unknown GPU '8.6'", "write capability: 8.6"),
        ("- driver: 535", "1:3: has neither name nor capability", "name: V100"),
        ("- name: V100\n  counts: 2", "2:3: unknown key 'counts'", "did you mean 'count'"),
        ("- name: V100\n  count: 0", "2:10: 'count' cannot be '0'", "whole number"),
        ("- name: V100\n  count: many", "2:10: 'count' cannot be 'many'", "whole number"),
        ("- name: V100\n  count: 99999999", "2:10: 'count' cannot be '99999999'", "1000000"),
        ("- name: V100\n  count: [1]", "2:10: 'count' cannot be a list", "whole number"),
        ("- capability: sm_90a", "1:15: 'capability' cannot be 'sm_90a'", "write 8.6"),
        ("- capability: {}", "1:15: 'capability' cannot be keys and values", "write 8.6"),
        ("- name: V100\n  driver: new", "2:11: 'driver' cannot be 'new'", "535.129.03"),
        ("- name: V100\n  driver: 535.54.03.01", "2:11: 'driver' cannot be '535.54.03.01'", "535.129.03"),
        ("- name: V100\n  driver: 12.1", "2:11: 'driver' cannot be '12.1'", "535.129.03"),
        ("- name: [V100]", "1:9: 'name' must be text, not a list", "nvidia-smi"),
        ("- name: $(id)", "1:9: 'name' cannot be '$(id)'", "nvidia-smi"),
        ("- name: ''", "1:9: 'name' cannot be ''", "nvidia-smi"),
        ("- name: V100\n  name: A100", "2:3: 'name' is already set", "remove one"),
        ("- []", "1:3: expected keys and values, found a list", "name: and its value"),
        ("gpus: V100", "1:1: 'gpus.yaml' must be a list", "- name: V100"),
        ("[]", "1:1: 'gpus.yaml' is empty", "- name: V100"),
        ("", "1:1: is empty", "- name: V100"),
        ("# nothing yet\n", "1:1: is empty", "- name: V100"),
        ("- name: V100\n- &a {}", "2:3: anchors", ""),
        ("- name: V100\n  arch: arm", "2:9: 'arch' cannot be 'arm'", "write amd64 or arm64"),
        ("- name: GH200\n  arch: x86_64", "2:9: that GPU comes only with arm64", "remove it"),
    ],
)
def test_faults_name_their_place_and_what_to_write(text: str, fault: str, write: str) -> None:
    with pytest.raises(RecipeError) as caught:
        parse_gpus(text, "gpus.yaml")
    told = "\n".join(caught.value.faults)
    assert f"gpus.yaml:{fault}" in told
    assert write in told


def test_the_processor_is_the_files_word_or_the_only_one_there_is() -> None:
    text = "- GH200\n- H100\n- {name: H100, arch: aarch64}\n- {capability: 9.0, arch: x86_64}\n- DGX Spark\n"
    assert [gpu.host for gpu in parse_gpus(text, "gpus.yaml")] == ["arm64", "", "arm64", "amd64", "arm64"]


def test_all_faults_are_told_at_once() -> None:
    with pytest.raises(RecipeError) as caught:
        parse_gpus("- name: V10\n- count: 3\n- name: T4\n  count: -1\n", "gpus.yaml")
    assert [fault.split(": ")[0] for fault in caught.value.faults] == [
        "gpus.yaml:1:9",
        "gpus.yaml:2:3",
        "gpus.yaml:4:10",
    ]


def test_large_files_are_refused() -> None:
    with pytest.raises(RecipeError, match="larger than 256 kB"):
        parse_gpus("- V100\n" * 50_000, "gpus.yaml")


def test_many_empty_lines_are_an_empty_file() -> None:
    with pytest.raises(RecipeError, match="is empty"):
        parse_gpus("\n" * 250_000, "gpus.yaml")


def test_a_capability_needs_no_known_gpu() -> None:
    (kind,) = parse_gpus("- capability: 13.0", "gpus.yaml")
    assert kind.capability == Capability(13, 0)


@given(st.text(max_size=200))
def test_any_text_is_a_list_of_gpus_or_told(text: str) -> None:
    try:
        told = [str(kind.where) for kind in parse_gpus(text, "gpus.yaml")]
    except RecipeError as error:
        told = list(error.faults)
    assert told
    assert all(line.startswith("gpus.yaml:") for line in told)
