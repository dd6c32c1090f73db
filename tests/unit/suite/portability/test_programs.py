"""The two programs as an image starts them, with a framework and a runtime that are made up here.

Real ones are tried in tests/e2e/test_families.py.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest

from imagefactory.suite.portability import exporting, rows, trying
from imagefactory.suite.portability.case import Case
from imagefactory.suite.portability.runtimes import RUNTIMES, Runtime
from imagefactory.verify.suite_files import SUITE_DIRECTORY

NONCE = "5eed"
INPUTS = {"x": numpy.arange(6.0, dtype="float32").reshape(3, 2)}


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "SECONDS", 0.0)


class Framework:
    """One whose models multiply; on the GPU by `slip` more."""

    NAME = "torch"

    def __init__(self, slip: float = 1.0, lost: str = "") -> None:
        self.slip, self.lost = slip, lost

    def version(self) -> str:
        return "2.0"

    def compute(self, network: float, inputs: Mapping[str, Any], device: str) -> list[Any] | None:
        slip = self.slip if device == "gpu" else 1.0
        return None if device == self.lost else [inputs["x"].astype("float64") * network * slip]

    def caller(self, network: float, inputs: Mapping[str, Any], device: str) -> Callable[[], None]:
        return lambda: None

    def export(
        self, network: float, inputs: Mapping[str, Any], path: str, *, outputs: int, batched: bool
    ) -> None:
        Path(path).write_text(json.dumps([network, outputs, batched]))


def exported(folder: Path, framework: Any, *devices: str, batched: bool = True) -> Any:
    case = Case("net", framework, 2.0, INPUTS, INPUTS, batched=batched)
    return exporting.export_case(case, str(folder), devices or ("cpu",), (1, 8))


@pytest.fixture
def looked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exporting, "read_model", lambda _: (20, 7))


# --- exporting ------------------------------------------------------------------------------------


@pytest.mark.usefixtures("looked")
def test_a_model_its_data_and_its_own_latencies(tmp_path: Path) -> None:
    model, (row,) = exported(tmp_path, Framework())
    assert json.loads((tmp_path / "net.onnx").read_text()) == [2.0, 1, True]
    with numpy.load(tmp_path / "net.npz", allow_pickle=False) as data:
        assert sorted(data.files) == ["in.x", "out.0"]
        assert (data["out.0"] == INPUTS["x"] * 2).all()
    assert (model["opset"], model["nodes"], model["held_out"]) == (20, 7, 3)
    assert model["inputs"] == [{"name": "x", "type": "float32", "shape": [3, 2]}]
    assert (row["by"], row["state"], row["error"]) == ("torch-cpu", "passed", 0.0)
    assert [one["batch"] for one in row["latencies"]] == [1, 8]


@pytest.mark.usefixtures("looked")
def test_a_model_of_one_size_is_timed_at_it(tmp_path: Path) -> None:
    model, (row,) = exported(tmp_path, Framework(), batched=False)
    assert [one["batch"] for one in row["latencies"]] == [model["held_out"]] == [1]


@pytest.mark.usefixtures("looked")
@pytest.mark.parametrize(
    ("framework", "outcome", "said"),
    [
        (Framework(slip=1.5), "wrong-numbers", "torch on the gpu is off by 0.5"),
        (Framework(lost="gpu"), "load-failed", "torch did not compute on the gpu"),
    ],
)
def test_the_framework_on_the_gpu_is_held_to_the_cpu(
    tmp_path: Path, framework: Framework, outcome: str, said: str
) -> None:
    _, (first, second) = exported(tmp_path, framework, "cpu", "gpu")
    assert (first["state"], second["state"]) == ("passed", "failed")
    assert (second["outcome"], second["by"]) == (outcome, "torch-gpu")
    assert said in second["detail"]


def test_what_cannot_be_exported_is_told_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: str) -> None:
        raise ValueError("no operator\nfor this")

    monkeypatch.setattr(exporting, "read_model", refuse)
    model, made = exported(tmp_path, Framework(), "cpu", "gpu")
    assert model["opset"] == 0
    assert made[0]["detail"] == "ValueError: no operator for this"
    assert made[0]["error"] is None


def start(*words: str | Path) -> subprocess.CompletedProcess[str]:
    entry = SUITE_DIRECTORY / "portable.py"
    return subprocess.run(
        [sys.executable, "-I", "-B", entry, *words], capture_output=True, text=True, timeout=300
    )


def ask(place: Path, **asked: Any) -> Path:
    path = place / "asked.json"
    path.write_text(json.dumps({"nonce": NONCE, "batches": [1], **asked}))
    return path


@pytest.mark.parametrize("words", [(), ("export",), ("try", "a"), ("other", "a", "b")])
def test_other_arguments_are_refused(words: tuple[str, ...]) -> None:
    done = start(*words)
    assert (done.returncode, done.stderr[:6]) == (2, "usage:")


def test_a_file_without_models_is_told_by_the_program(tmp_path: Path) -> None:
    (tmp_path / "models.py").write_text("def models():\n    raise ValueError('no weights')\n")
    asked = ask(tmp_path, models=str(tmp_path / "models.py"), gpu=False)
    assert start("export", asked, tmp_path).returncode == 1
    report = json.loads((tmp_path / exporting.REPORT).read_text())
    assert (report["fault"], report["running"]) == ("models.py:2: ValueError: no weights", "")
    assert (report["nonce"], report["models"]) == (NONCE, [])
    assert report["processor"]


def test_a_file_that_ends_the_process_leaves_a_report_that_says_where(tmp_path: Path) -> None:
    (tmp_path / "models.py").write_text("import os\nos._exit(3)\n")
    asked = ask(tmp_path, models=str(tmp_path / "models.py"), gpu=False)
    assert start("export", asked, tmp_path).returncode == 3
    assert json.loads((tmp_path / exporting.REPORT).read_text())["running"] == "models()"


# --- trying ---------------------------------------------------------------------------------------


def test_a_runtime_that_the_image_lacks(tmp_path: Path) -> None:
    model = {"name": "net", "tolerance": 1e-4, "batched": True, "held_out": 3}
    models = [model, {**model, "name": "vae"}]
    asked = ask(tmp_path, folder=str(tmp_path), runtimes=["openvino-cpu", "tvm-cpu"], models=models)
    assert start("try", asked, tmp_path).returncode == 1
    report = json.loads((tmp_path / trying.REPORT).read_text())
    made = report["rows"]
    assert [(row["model"], row["by"], row["state"]) for row in made] == [
        (name, by, "failed") for by in ("openvino-cpu", "tvm-cpu") for name in ("net", "vae")
    ]
    assert "this image has no openvino" in made[0]["detail"]
    assert made[0]["detail"].endswith("add openvino")
    assert made[2]["detail"].endswith("add apache-tvm")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["asked.json", trying.REPORT]


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("import os; os._exit(7)", "the process ended by exit code 7 and said nothing"),
        ("import sys; sys.stderr.write('no kernel'); sys.exit(1)", "by exit code 1: no kernel"),
        ("import os; os.kill(os.getpid(), 9)", f"the process ended by signal {int(signal.SIGKILL)}"),
    ],
)
def test_a_runtime_that_takes_its_process_down_leaves_the_models_behind_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, said: str
) -> None:
    """Of three models the second kills; the first and the third are done all the same."""
    entry = tmp_path / "entry.py"
    entry.write_text(
        "import json, os, sys\n"
        "_, asked, part, name, first = sys.argv[1:]\n"
        "names = ['a', 'b', 'c']\n"
        "done = []\n"
        "for model in names[names.index(first):]:\n"
        f"    if model == 'b':\n        {code}\n"
        "    done.append({'model': model, 'by': name, 'state': 'passed', 'detail': ''})\n"
        "    open(part, 'w').write(json.dumps({'rows': done}))\n"
    )
    monkeypatch.setattr(trying, "ENTRY", str(entry))
    asked = ask(tmp_path, runtimes=["tvm-cpu"], models=[{"name": name} for name in "abc"])
    assert trying.main(str(asked), str(tmp_path)) == 1
    made = json.loads((tmp_path / trying.REPORT).read_text())["rows"]
    assert [(row["model"], row["state"]) for row in made] == [
        ("a", "passed"),
        ("b", "failed"),
        ("c", "passed"),
    ]
    assert said in made[1]["detail"]


class Engine:
    """A runtime that multiplies by what the file says, `elsewhere` where it does not run on its own."""

    NAME = "tvm"

    def __init__(self, slip: float = 1.0, *, elsewhere: bool = False) -> None:
        self.slip, self.elsewhere = slip, elsewhere
        self.proven = 0

    def version(self) -> str:
        return "1.0"

    def open_session(self, path: str, inputs: Any, runtime: Runtime, threads: int, profile: str) -> Any:
        return SimpleNamespace(factor=json.loads(Path(path).read_text())[0] * self.slip, inputs=inputs)

    def compute(self, session: Any) -> list[Any] | None:
        return None if self.elsewhere else [session.inputs["x"].astype("float64") * session.factor]

    def count_kernels(self, session: Any) -> int:
        self.proven += 1
        return 4

    def caller(self, session: Any) -> Callable[[], None]:
        return lambda: None


@pytest.mark.usefixtures("looked")
@pytest.mark.parametrize(
    ("engine", "state", "detail", "error"),
    [
        (Engine(), "passed", "", 0.0),
        (Engine(1.5), "failed", "tvm on the cpu is off by 0.5 (at most 2e-04)", 0.5),
        (Engine(float("nan")), "failed", "off by inf", None),
        (Engine(elsewhere=True), "failed", "tvm did not compute on the cpu", None),
    ],
)
def test_a_model_by_a_runtime(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    engine: Engine,
    state: str,
    detail: str,
    error: float | None,
) -> None:
    model, _ = exported(tmp_path, Framework())
    monkeypatch.setattr(trying, "_engine", lambda _: engine)
    row = trying.try_model(model, RUNTIMES["tvm-cpu"], {"folder": str(tmp_path), "batches": [1, 8]})
    assert (row["state"], row["error"], row["kernels"]) == (state, error, 4)
    assert detail in row["detail"]
    if state == "passed":
        assert [one["batch"] for one in row["latencies"]] == [1, 8]
        assert engine.proven == 3  # what is timed is proven too


def test_a_report_is_never_seen_half(tmp_path: Path) -> None:
    rows.write(str(tmp_path / "a.json"), NONCE, {"rows": []})
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]
    with pytest.raises(ValueError, match="not JSON compliant"):
        rows.write(str(tmp_path / "a.json"), NONCE, {"rows": [float("nan")]})
    assert json.loads((tmp_path / "a.json").read_text())["nonce"] == NONCE
