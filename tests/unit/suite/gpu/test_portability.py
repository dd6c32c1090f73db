"""The portability check's own decisions, with a framework and a runtime that are made up here.

Real ones are tried in tests/e2e/test_families.py.
"""

from __future__ import annotations

import importlib
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest

from imagefactory.gpu.knowledge.packages import cuda_wheels
from imagefactory.lock.files import read_lock
from imagefactory.model import Target
from imagefactory.recipes.expand import expand_all
from imagefactory.recipes.read import read_bases, read_recipes
from imagefactory.suite import table as frameworks
from imagefactory.suite.context import CheckFailure
from imagefactory.suite.gpu import table
from imagefactory.suite.gpu.checks import portability
from imagefactory.suite.gpu.context import MeasuredFailure
from imagefactory.suite.portability import case, exporting, onnxruntime, rows, runtimes
from imagefactory.suite.portability.runtimes import RUNTIMES

ROOT = Path(__file__).parents[4]
CUDA = "CUDAExecutionProvider"


def array(*values: float) -> Any:
    return numpy.array(values)


# --- where it applies ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("framework", "packages", "reason"),
    [
        ("torch", {"onnx": "1", "onnxruntime-gpu": "1.23.2", "nvidia-cuda-runtime-cu12": "12.4.127"}, ""),
        ("torch", {"onnx": "1", "onnxruntime-gpu": "1.31.1", "nvidia-cuda-runtime": "13.2.86"}, ""),
        ("torch", {"onnx": "1", "onnxruntime-gpu": "1.23.2", "cuda-cudart": "12.6.77"}, ""),
        ("torch", {"onnx": "1", "onnxruntime-gpu": "1.23.2"}, ""),
        ("torch", {}, "the lock has no onnx and no onnxruntime-gpu"),
        ("torch", {"onnx": "1", "onnxruntime": "1.23.2"}, "the lock has no onnxruntime-gpu"),
        (
            "torch",
            {"onnx": "1", "onnxruntime-gpu": "1.31.1", "nvidia-cuda-runtime-cu12": "12.4.127"},
            "onnxruntime-gpu 1.31.1 is built for CUDA 13, the lock has CUDA 12",
        ),
        (
            "jax",
            {"onnx": "1", "onnxruntime-gpu": "1.31.1"},
            "the suite has models of its own for torch, not for jax",
        ),
        ("onnxruntime", {}, "the suite has models of its own for torch, not for onnxruntime"),
        ("other", {}, "no framework of the suite is in this image"),
    ],
)
def test_where_it_applies(framework: str, packages: Mapping[str, str], reason: str) -> None:
    assert table.not_applicable(framework, "portability", packages) == reason


def test_the_cuda_of_a_runtime_is_what_the_factory_knows() -> None:
    known = [wheel for wheel in cuda_wheels() if wheel.package == "onnxruntime-gpu"]
    assert len({wheel.cuda.partition(".")[0] for wheel in known}) == len(runtimes.BUILT_FOR)
    for wheel in known:
        assert runtimes.cuda_of_runtime(f"{wheel.version}.0") == wheel.cuda.partition(".")[0], wheel.version


def committed() -> Iterator[tuple[Target, dict[str, str]]]:
    for target in expand_all(read_recipes(ROOT / "recipes"), read_bases(ROOT / "recipes")):
        lock = read_lock(ROOT / "lockfiles", target)
        assert lock, target.name
        yield target, {package.name: package.version for package in lock.packages}


def test_it_applies_to_the_family_that_is_for_it() -> None:
    applies = {
        target.family
        for target, packages in committed()
        if not table.not_applicable(
            frameworks.FRAMEWORKS.get(target.framework, frameworks.OTHER), "portability", packages
        )
    }
    assert applies == {"pytorch-onnx"}


def test_the_family_changes_nothing_below() -> None:
    """ONNX Runtime lives with the CUDA libraries that PyTorch brings; cuRAND alone may be missing there."""
    packages = {target.name: found for target, found in committed()}
    on = [target for target, _ in committed() if target.family == "pytorch-onnx"]
    assert len(on) >= 4
    for target in on:
        below, own = packages[target.on], packages[target.name]
        assert below.items() <= own.items()
        added = {name for name in own.keys() - below.keys() if name.startswith(("nvidia-", "cuda-"))}
        assert added <= {"nvidia-curand"}


@pytest.mark.parametrize("name", exporting.EXPORTERS)
def test_every_exporter_has_its_names(name: str) -> None:
    module = importlib.import_module(f"imagefactory.suite.portability.{name}")
    assert name == module.NAME
    for function in (
        *("version", "prepare", "owns", "settle", "override", "canonical"),
        *("compute", "caller", "export"),
    ):
        assert callable(getattr(module, function)), f"{name}: {function}"


@pytest.mark.parametrize("name", runtimes.MAKERS)
def test_every_maker_has_its_names(name: str) -> None:
    module = importlib.import_module(f"imagefactory.suite.portability.{name}_models")
    for function in ("build", "as_double", "damaged"):
        assert callable(getattr(module, function)), f"{name}: {function}"


@pytest.mark.parametrize("name", sorted({row.module for row in RUNTIMES.values()}))
def test_every_runtime_has_its_names(name: str) -> None:
    module = importlib.import_module(f"imagefactory.suite.portability.{name}")
    assert name == module.NAME
    for function in ("version", "open_session", "compute", "caller", "count_kernels"):
        assert callable(getattr(module, function)), f"{name}: {function}"


# --- what is compared ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("found", "outcome", "said"),
    [
        ([array(1.0, 2.0, 3.0, 4.001)], table.WRONG_NUMBERS, "onnxruntime on the gpu is off by 0.00025"),
        ([array(1.0, 2.0, 3.0, float("nan"))], table.WRONG_NUMBERS, "off by inf"),
        ([array(1.0, 2.0)], table.WRONG_NUMBERS, "off by inf"),
        ([], table.WRONG_NUMBERS, "off by inf"),
        (None, table.LOAD_FAILED, "onnxruntime did not compute on the gpu"),
    ],
)
def test_what_differs_fails(found: Any, outcome: str, said: str) -> None:
    with pytest.raises(CheckFailure) as caught:
        list(portability.agree("gpu-onnxruntime", found, [array(1.0, 2.0, 3.0, 4.0)]))
    assert caught.value.outcome == outcome
    assert said in caught.value.detail


def test_what_agrees_says_how_far_it_is_off() -> None:
    ((name, error),) = portability.agree("cpu-torch", [array(1.0, 4.0001)], [array(1.0, 4.0)])
    assert (name, error) == ("cpu-torch-error", pytest.approx(2.5e-5))


def test_the_smallest_wrong_weight_that_the_controls_make_is_beyond_the_tolerance() -> None:
    with pytest.raises(CheckFailure, match="is not detected"):
        portability.check_differs([array(1.0, 4.0001)], [array(1.0, 4.0)])
    portability.check_differs([array(1.0, 4.04)], [array(1.0, 4.0)])


# --- a framework and a runtime of the test -------------------------------------------------------

MODEL = case.Model("double", "layers", (case.Sample("x", (2,)),), seed=1)


@dataclass
class Exporter:
    """A framework whose only model doubles; `draw` is added to each result, `lost` where nothing computes."""

    draw: Callable[[], float] = lambda: 0.0
    wrong: float = 1.01
    lost: str = ""
    exported: list[float] = field(default_factory=list)
    export_factor: float | None = None
    NAME = "torch"

    def version(self) -> str:
        return "2.0"

    def prepare(self, threads: int) -> None:
        assert threads > 0

    def build(self, model: case.Model) -> float:
        if model.name == "broken":
            raise RuntimeError("no kernel image is available")
        return 2.0

    def as_double(self, network: float) -> float:
        return network

    def damaged(self, network: float) -> float:
        return network * self.wrong

    def compute(self, network: float, sample: Mapping[str, Any], device: str) -> list[Any] | None:
        return None if device == self.lost else [network * sample["x"] + self.draw()]

    def caller(self, network: float, sample: Mapping[str, list[float]], device: str) -> Callable[[], None]:
        return lambda: None

    def export(
        self, network: float, sample: Mapping[str, Any], path: str, *, outputs: int, batched: bool
    ) -> None:
        assert (outputs, batched) == (1, False)
        Path(path).write_text(str(self.export_factor or network))


@dataclass
class Runtime:
    """Runs what `Exporter` exports. `lost` is a device on which it computes elsewhere."""

    lost: str = ""
    elsewhere: str = ""
    NAME = "onnxruntime"

    def version(self) -> str:
        return "1.0"

    def read_model(self, path: str) -> tuple[int, int]:
        return 18, 1

    def open_session(
        self, path: str, sample: Mapping[str, Any], wanted: Any, threads: int, profile: str
    ) -> Any:
        return SimpleNamespace(factor=float(Path(path).read_text()), sample=sample, wanted=wanted)

    def compute(self, session: Any) -> list[Any] | None:
        device = "gpu" if session.wanted.gpu else "cpu"
        return None if device == self.lost else [session.factor * session.sample["x"]]

    def caller(self, session: Any) -> Callable[[], None]:
        return lambda: None

    def count_kernels(self, session: Any) -> int:
        providers = session.wanted.providers
        return onnxruntime.count_events([kernel(self.elsewhere or providers[0])], providers)


def kernel(provider: str) -> dict[str, Any]:
    return {"cat": "Node", "name": "a_kernel_time", "args": {"provider": provider, "op_name": "MatMul"}}


BENCH = portability.PortabilityModules(
    exporter=Exporter(),
    maker=Exporter(),
    runtime=Runtime(),
    devices=("cpu", "gpu"),
    threads=2,
)


@pytest.fixture(autouse=True)
def _plain_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small arrays, and few passes."""
    monkeypatch.setattr(case, "make_sample", lambda _: {"x": array(1.0, 2.0)})
    monkeypatch.setattr(rows, "SECONDS", 0.0)


def test_a_model_gives_errors_and_latencies_of_both_on_both() -> None:
    numbers = dict(portability.try_model(MODEL, BENCH))
    engines = [f"{device}-{name}" for device in ("cpu", "gpu") for name in ("torch", "onnxruntime")]
    kinds = ("error", "p50-ms", "p95-ms")
    expected = {f"{engine}-{kind}" for engine in engines for kind in kinds}
    expected |= {"opset", "nodes", *(f"{one}-onnxruntime-kernels" for one in BENCH.devices)}
    assert numbers.keys() == expected


@pytest.mark.parametrize(
    ("bench", "outcome", "said"),
    [
        (
            replace(BENCH, exporter=Exporter(export_factor=2.02)),
            table.WRONG_NUMBERS,
            "onnxruntime on the cpu is off by 0.01",
        ),
        (
            replace(BENCH, exporter=Exporter(lost="gpu")),
            table.LOAD_FAILED,
            "torch did not compute on the gpu",
        ),
        (
            replace(BENCH, runtime=Runtime(lost="gpu")),
            table.LOAD_FAILED,
            "onnxruntime did not compute on the gpu",
        ),
        (
            replace(BENCH, devices=("gpu",), runtime=Runtime(elsewhere="CPUExecutionProvider")),
            table.LOAD_FAILED,
            f"not all ran on {CUDA}: MatMul on CPUExecutionProvider",
        ),
        (
            replace(BENCH, exporter=Exporter(draw=iter(range(100)).__next__)),
            table.LOAD_FAILED,
            "draws random numbers",
        ),
        (replace(BENCH, maker=Exporter(wrong=1.0)), table.LOAD_FAILED, "a wrong weight is not detected"),
    ],
    ids=["wrong-export", "framework-elsewhere", "runtime-elsewhere", "kernel-elsewhere", "drawn", "blind"],
)
def test_what_must_fail_fails(bench: portability.PortabilityModules, outcome: str, said: str) -> None:
    with pytest.raises(CheckFailure) as caught:
        list(portability.try_model(MODEL, bench))
    assert caught.value.outcome == outcome
    assert said in caught.value.detail


def test_one_model_that_breaks_hides_no_other() -> None:
    bench = replace(BENCH, exporter=Exporter(export_factor=3.0))
    with pytest.raises(MeasuredFailure) as caught:
        portability.try_models((replace(MODEL, name="broken"), MODEL), bench)
    first, second = caught.value.detail.split("; ")
    assert first == "broken: RuntimeError: no kernel image is available"
    assert second.startswith("double: onnxruntime on the cpu ")
    assert caught.value.outcome == "no-kernel"
    assert caught.value.numbers["double-cpu-onnxruntime-error"] == pytest.approx(0.5)
    assert "double-cpu-torch-p50-ms" in caught.value.numbers


def test_what_fails_alike_is_told_once() -> None:
    bench = replace(BENCH, exporter=Exporter(lost="gpu"), devices=("gpu",))
    with pytest.raises(MeasuredFailure) as caught:
        portability.try_models((MODEL, replace(MODEL, name="other")), bench)
    assert caught.value.detail.startswith("double, other: torch ")


def test_all_that_agrees_is_one_line() -> None:
    finding = portability.try_models((MODEL, replace(MODEL, name="other")), BENCH)
    assert finding.detail == (
        "double, other give the same in torch 2.0 and ONNX Runtime 1.0 on cpu and gpu, off by 0 at most"
    )
    assert finding.numbers["threads"] == 2
    assert {"double-gpu-onnxruntime-p50-ms", "other-cpu-torch-p95-ms"} < finding.numbers.keys()


# --- ONNX Runtime --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("events", "said"),
    [
        ([kernel(CUDA), kernel("CPUExecutionProvider")], "MatMul on CPUExecutionProvider"),
        ([], "names nothing that ran"),
        ([{"cat": "Session", "name": "model_run"}], "names nothing that ran"),
        (
            [{"cat": "Node", "name": "a_fence_before", "args": {"op_name": "MatMul"}}],
            "names nothing that ran",
        ),
    ],
)
def test_a_profile_that_proves_nothing(events: list[dict[str, Any]], said: str) -> None:
    with pytest.raises(CheckFailure, match=said):
        onnxruntime.count_events(events, (CUDA,))


def test_a_profile_that_proves_it() -> None:
    events = [{"cat": "Session", "name": "run"}, kernel(CUDA), kernel(CUDA)]
    assert onnxruntime.count_events(events, (CUDA,)) == 2
    first = ("TensorrtExecutionProvider", CUDA)
    assert onnxruntime.count_events([*events, kernel(first[0])], first) == 3
    with pytest.raises(CheckFailure, match="Tensorrt"):
        onnxruntime.count_events(events, first)


@dataclass
class FakeOnnxRuntime:
    """What `open_session` asks of the module; `got` are the providers that a session ends up with."""

    available: tuple[str, ...]
    got: tuple[str, ...]
    __version__ = "1.31.1"

    def get_available_providers(self) -> list[str]:
        return list(self.available)

    def SessionOptions(self) -> Any:
        self.config: dict[str, str] = {}
        return SimpleNamespace(add_session_config_entry=self.config.__setitem__)

    def InferenceSession(self, path: str, options: Any, **asked: Any) -> Any:
        self.asked = asked
        binding = SimpleNamespace(bind_ortvalue_input=lambda *_: None, synchronize_inputs=lambda: None)
        return SimpleNamespace(
            get_providers=lambda: list(self.got), io_binding=lambda: binding, get_outputs=lambda: []
        )

    OrtValue = SimpleNamespace(ortvalue_from_numpy=lambda *_: None)


def opened(monkeypatch: pytest.MonkeyPatch, fake: FakeOnnxRuntime) -> str:
    monkeypatch.setattr(onnxruntime, "onnxruntime", fake)
    with pytest.raises(CheckFailure) as caught:
        onnxruntime.open_session("model.onnx", {}, RUNTIMES["onnxruntime-cuda"], 2, "profile")
    return caught.value.detail


def test_a_build_without_the_provider(monkeypatch: pytest.MonkeyPatch) -> None:
    said = opened(monkeypatch, FakeOnnxRuntime(("CPUExecutionProvider",), ()))
    assert said.startswith(f"onnxruntime 1.31.1 has no {CUDA}")


def test_a_session_that_ends_up_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeOnnxRuntime((CUDA,), ("CPUExecutionProvider",))
    assert opened(monkeypatch, fake) == f"requested {CUDA} from ONNX Runtime, got CPUExecutionProvider"
    assert fake.config == {"session.disable_cpu_ep_fallback": "1"}
    assert fake.asked["enable_fallback"] == 0
    assert [provider for provider, _ in fake.asked["providers"]] == [CUDA]


def test_a_session_keeps_the_arrays_whose_memory_is_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    on_cpu = ("CPUExecutionProvider",)
    monkeypatch.setattr(onnxruntime, "onnxruntime", FakeOnnxRuntime(on_cpu, on_cpu))
    inputs = {"x": array(1.0)}
    bound = weakref.ref(inputs["x"])
    session = onnxruntime.open_session("model.onnx", inputs, RUNTIMES["onnxruntime-cpu"], 2, "profile")
    inputs.clear()
    assert bound() is not None
    del session
    assert bound() is None


# --- latencies -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "percent", "expected"),
    [([3.0], 50, 3.0), ([1.0, 2.0, 3.0, 4.0], 50, 2.0), (list(range(100, 0, -1)), 95, 95), ([1, 2], 95, 2)],
)
def test_percentiles_by_nearest_rank(values: list[float], percent: int, expected: float) -> None:
    assert rows.percentile(values, percent) == expected


def test_a_slow_call_is_still_called_often_enough() -> None:
    calls: list[None] = []
    p50, p95 = rows.latencies(lambda: calls.append(None))
    assert len(calls) == rows.WARM + rows.LEAST
    assert 0 <= p50 <= p95


# --- the models ----------------------------------------------------------------------------------


def test_each_model_has_its_own_name_seed_and_sample() -> None:
    assert len({model.name for model in case.MODELS}) == len({model.seed for model in case.MODELS}) == 4
    assert {"alexnet", "squeezenet", "bert"} < {model.name for model in case.MODELS}
    assert all(model.sample for model in case.MODELS)
    assert [model.name for model in case.MODELS if model.override] == ["variational"]
