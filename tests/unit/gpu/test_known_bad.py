"""Known faults: every rule fits where it must and nowhere else."""

from __future__ import annotations

import pytest
from packaging.specifiers import SpecifierSet

from imagefactory.gpu.capability import parse_capability
from imagefactory.gpu.known_bad import ANSWERS, components, matching_rules, rules, versions_in, versions_of
from imagefactory.gpu.values import ScanResult
from tests.made.contents import contents


@pytest.mark.parametrize(
    ("rule", "versions", "fits", "fits_not"),
    [
        ("cublas-tensor-memory", {"cublas": "12.8.4.1"}, "10.0 10.3 11.0", "9.0 12.0"),
        ("cublas-tensor-memory", {"cublas": "13.1.0.3"}, "10.0", "8.0"),
        ("cublas-tensor-memory", {"cublas": "12.6.4.1"}, "", "10.0"),
        ("cublas-tensor-memory", {"cublas": "13.2.0.9"}, "", "10.0"),
        ("cudnn-9.10.0-enums", {"cudnn": "9.10.0.56"}, "7.0 12.0", ""),
        ("cudnn-9.10.0-enums", {"cudnn": "9.10.1.4"}, "", "8.0"),
        ("cudnn-multi-gpu-plans", {"cudnn": "9.8.0.87", "cublas": "12.9.0.13"}, "8.0", ""),
        ("cudnn-multi-gpu-plans", {"cudnn": "9.8.0.87", "cublas": "12.8.4.1"}, "", "8.0"),
        ("cudnn-multi-gpu-plans", {"cudnn": "9.8.0.87"}, "", "8.0"),
        ("cudnn-before-turing", {"cudnn": "9.28.0.42"}, "6.1 7.0 7.2", "7.5 8.0"),
        ("cudnn-before-turing", {"cudnn": "9.10.2.21"}, "", "7.0"),
        ("cudnn-before-blackwell", {"cudnn": "9.5.1.17"}, "10.0 12.0 12.1", "9.0"),
        ("cudnn-before-blackwell", {"cudnn": "9.7.0.66"}, "", "10.0 12.0"),
        ("ort-cudnn-before-turing", {"onnxruntime": "1.24.4", "cudnn": "9.28.0.42"}, "6.1 7.0", "7.5"),
        ("ort-cudnn-before-turing", {"onnxruntime": "1.24.4", "cudnn": "9.10.2.21"}, "", "7.0"),
        ("xla-jax-before-blackwell", {"jax": "0.4.30"}, "10.0 12.0 12.1", "9.0"),
        ("xla-jax-before-blackwell", {"jax": "0.5.0"}, "10.0", "8.9"),
        ("xla-jax-before-blackwell", {"jax": "0.5.1"}, "", "10.0"),
        ("xla-rubin", {"jax": "0.11.1"}, "10.7", "10.0 10.3 12.0"),
        ("xla-tensorflow-before-blackwell", {"tensorflow": "2.15.1"}, "10.0 12.0", "9.0"),
        ("xla-tensorflow-before-blackwell", {"tensorflow": "2.19.0"}, "", "12.0"),
        ("nccl-consumer-blackwell", {"nccl": "2.25.1"}, "12.0 12.1", "10.0 9.0"),
        ("nccl-consumer-blackwell", {"nccl": "2.26.2"}, "", "12.0"),
        ("ort-1.23.0-hopper-ptx", {"onnxruntime": "1.23.0"}, "10.0 12.0", "9.0"),
        ("ort-1.23.0-hopper-ptx", {"onnxruntime": "1.23.2"}, "", "12.0"),
        ("triton-before-volta", {"triton": "2.3.1"}, "6.1", "7.0"),
        ("triton-before-consumer-blackwell", {"triton": "3.2.0"}, "12.0", "9.0"),
        ("triton-ptxas-12.8", {"triton": "3.5.1"}, "10.3 12.1", "10.0 12.0"),
        ("triton-ptxas-12.8", {"triton": "3.6.0"}, "", "12.1"),
        ("triton-ptxas-13.0", {"triton": "3.6.0"}, "11.0", "10.0 12.0"),
        ("triton-ptxas-13.0", {"triton": "3.7.0"}, "", "11.0"),
        ("triton-ptxas-13.4", {"triton": "3.8.0"}, "10.7", "10.0 10.3 11.0"),
        ("triton-ptxas-13.4", {"triton": "3.9.0"}, "", "10.7"),
        ("conv3d-bfloat16", {"torch": "2.8.0", "cudnn": "9.10.2.21"}, "9.0", ""),
        ("conv3d-bfloat16", {"torch": "2.7.1", "cudnn": "9.5.1.17"}, "", "9.0"),
        ("conv3d-bfloat16-memory", {"torch": "2.9.1+cu128", "cudnn": "9.10.2.21"}, "8.0", ""),
        ("conv3d-bfloat16-memory", {"torch": "2.9.1", "cudnn": "9.21.0.82"}, "", "8.0"),
        ("tensorflow-before-ampere", {"tensorflow": "2.3.0"}, "8.0 8.6 9.0", "7.5"),
        ("tensorflow-before-ampere", {"tensorflow": "2.4.0"}, "", "8.6"),
        ("tensorflow-before-turing", {"tensorflow": "1.10.1"}, "7.5", "7.0 8.0"),
        ("tensorflow-before-turing", {"tensorflow": "1.13.1"}, "", "7.5"),
        ("tensorflow-rocm-2.14-list", {"tensorflow-rocm": "2.14.0.600"}, "gfx1030 gfx1100", "gfx90a gfx1102"),
        ("cuda-10-before-ampere", {"cudatoolkit": "10.1.243", "tensorflow": "2.4.1"}, "8.0 8.6", "7.5"),
        ("cuda-10-before-ampere", {"cudatoolkit": "11.0.3"}, "", "8.6"),
        ("faiss-cublas-before-ampere", {"faiss": "1.7.2"}, "8.0 8.9", "7.5"),
        ("tensorflow-2.16.1-cuda-wheels", {"tensorflow": "2.16.1"}, "5.0 9.0", ""),
        ("xformers-hopper-attention", {"xformers": "0.0.30"}, "10.0 12.0", "9.0 8.0"),
        ("xformers-hopper-attention", {"xformers": "0.0.28.post3"}, "", "12.0"),
        ("xformers-hopper-attention", {"xformers": "0.0.32.post2"}, "12.0", "9.0"),
        ("torch-cuda-9-before-turing", {"torch": "1.1.0", "build-cuda": "9.0"}, "7.5 8.0", "7.0"),
        ("torch-cuda-9-before-turing", {"torch": "1.1.0", "build-cuda": "10.0"}, "", "7.5"),
        ("torch-cuda-9-before-turing", {"torch": "1.1.0"}, "", "7.5"),
        ("tensorflow-rocm-gfx803", {"tensorflow-rocm": "2.3.4"}, "gfx803", "gfx900"),
        ("tensorflow-rocm-gfx803", {"tensorflow-rocm": "2.2.0"}, "", "gfx803"),
        ("torch-rocm-gfx803", {"torch": "1.8.1"}, "gfx803", "gfx906"),
        ("tensorrt-before-ampere", {"tensorrt": "7.0.0.11"}, "8.0 8.6", "7.5"),
        ("tensorrt-before-ampere", {"tensorrt": "7.1.3"}, "", "8.0 8.6"),
        ("tensorrt-before-8.6", {"tensorrt": "7.1.3"}, "8.6", "8.0 7.5"),
        ("tensorrt-before-8.6", {"tensorrt": "7.2.1.6"}, "", "8.6"),
        ("tensorrt-after-maxwell", {"tensorrt": "8.6.1"}, "3.5 5.2", "6.0"),
        ("tensorrt-after-maxwell", {"tensorrt": "8.5.3.1"}, "", "5.2"),
        ("xformers-cutlass-before-blackwell", {"xformers": "0.0.33.post2"}, "10.0 12.0", "9.0"),
        ("xformers-cutlass-before-blackwell", {"xformers": "0.0.32.post2"}, "", "12.0"),
        ("vllm-before-volta", {"vllm": "0.6.3"}, "6.1", "7.0 9.0"),
        ("cudnn-before-maxwell", {"cudnn": "9.1.0.70"}, "3.5 3.7", "5.0 8.0"),
        ("cudnn-before-maxwell", {"cudnn": "8.7.0.84"}, "", "3.7"),
        ("sglang-before-turing", {"sglang": "0.4.6"}, "7.0 6.1", "7.5"),
    ],
)
def test_rules(rule: str, versions: dict[str, str], fits: str, fits_not: str) -> None:
    for capability in fits.split():
        assert rule in [one.id for one in matching_rules(versions, parse_capability(capability))]
    for capability in fits_not.split():
        assert rule not in [one.id for one in matching_rules(versions, parse_capability(capability))]


@pytest.mark.parametrize(
    ("rule", "versions", "capability", "fits", "fits_not"),
    [
        ("nccl-nvswitch-before-12.3", {"nccl": "2.26.2"}, "9.0", "535 535.183.01 525.60.13", "550.54.14 570"),
        ("nccl-nvswitch-before-12.3", {"nccl": "2.26.2"}, "8.0", "", "535"),
        ("nccl-nvswitch-before-12.3", {"nccl": "2.26.5"}, "9.0", "", "535"),
        ("xgboost-3.0.0-driver", {"xgboost": "3.0.0"}, "7.0", "535.161.08 550", "570.26"),
        ("xgboost-3.0.0-driver", {"xgboost": "3.0.1"}, "7.0", "", "535.161.08"),
        ("warp-driver-580", {"warp": "1.7.1"}, "12.0", "580.65.06 595", "575.51.03 570"),
        ("warp-driver-580", {"warp": "1.8.1"}, "12.0", "", "580.65.06"),
    ],
)
def test_rules_of_some_drivers_alone(
    rule: str, versions: dict[str, str], capability: str, fits: str, fits_not: str
) -> None:
    """Without a driver none fits, since another one may be chosen."""

    def found(driver: str) -> list[str]:
        return [one.id for one in matching_rules(versions, parse_capability(capability), driver)]

    assert all(rule in found(driver) for driver in fits.split())
    assert all(rule not in found(driver) for driver in ["", *fits_not.split()])


def test_every_rule_was_tried_here() -> None:
    marks = [*test_rules.pytestmark, *test_rules_of_some_drivers_alone.pytestmark]  # type: ignore[attr-defined]
    tried = {mark.args[1][i][0] for mark in marks for i in range(len(mark.args[1]))}
    assert tried == {rule.id for rule in rules()}
    assert {rule.id for rule in rules() if rule.drivers} == {
        "nccl-nvswitch-before-12.3",
        "xgboost-3.0.0-driver",
        "warp-driver-580",
    }


def test_the_table_is_sound() -> None:
    names = {one.name for one in components()}
    assert len({rule.id for rule in rules()}) == len(rules())
    for rule in rules():
        assert rule.effect in (*ANSWERS, "some calls fail", "wrong results", "may be wrong", "costly")
        assert rule.needs
        for name, versions in rule.needs:
            assert name in names
            assert SpecifierSet(versions)
        for capabilities in rule.capabilities:
            assert capabilities.startswith("gfx") or SpecifierSet(capabilities)
        assert not rule.drivers or SpecifierSet(rule.drivers)
        filled = rule.text.format_map({name: "9.9" for name, _ in rule.needs})
        assert "{" not in filled
        assert ("wrong" in filled) == (
            rule.effect in ("wrong results", "may be wrong") or "wrong ones" in filled
        )


def test_the_sentence_names_what_was_found() -> None:
    (found,) = matching_rules({"cublas": "12.8.4.1"}, parse_capability("10.0"))
    assert found.id == "cublas-tensor-memory"
    assert str(found).startswith("cuBLAS 12.8.4.1 frees tensor memory")
    assert str(found).count("wrong") == 1  # the effect is told once
    assert found.source.startswith("documented: jax-ml/jax")


def test_versions_of_locks_and_scans() -> None:
    lock = [("nvidia-cublas-cu12", "12.8.4.1"), ("numpy", "2.0"), ("triton", "3.5.1")]
    assert versions_of(lock) == {"cublas": "12.8.4.1", "triton": "3.5.1"}
    conda = contents(packages=["libcublas==12.9.1.4=h9ab20c4_0", "cudnn==9.10.1.4=h0fdc2d1_0"])
    assert versions_in(conda) == {"cublas": "12.9.1.4", "cudnn": "9.10.1.4"}
    files = ScanResult(
        source="", libraries=(), toolkit=("libcublas.so.12", "libcublas.so.12.8.4.1", "libnccl.so.2.26.2")
    )
    assert versions_in(files) == {"cublas": "12.8.4.1", "nccl": "2.26.2"}
    both = ScanResult(source="", libraries=(), packages=conda.packages, toolkit=("libcublas.so.11.1.1",))
    assert versions_in(both)["cublas"] == "12.9.1.4"


def test_odd_versions_fit_no_rule() -> None:
    assert matching_rules({"cublas": "12.8_custom", "triton": "?"}, parse_capability("10.0")) == ()
    assert matching_rules({}, parse_capability("10.0")) == ()
