"""Everything that needs a GPU, within 6 minutes, by what is at hand: `tests/run gpu [--output FOLDER]`.

Rewrites report.json and report.md after every row, so what was found stays when the machine goes. Each step
is a process with a limit of its own, so a crash or a hang costs one answer. What cannot be done here has a
row of its own, `not-run` with its reason. It needs the standard library; two parts need packaging and PyYAML.
Nothing here makes a verdict: tests/gpu/image.py does, in a real image.
Exit code 0 when nothing failed, 1 when something did, 9 without a GPU.
"""

from __future__ import annotations

import argparse
import glob
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from imagefactory.suite import table as frameworks  # noqa: E402
from imagefactory.suite.gpu import kernels, table  # noqa: E402

SUITE = ROOT / "imagefactory/suite"
ON_DRIVER = Path(__file__).with_name("on_driver.py")
SCANNED = Path(__file__).with_name("scanned.py")
TOTAL = 340.0  # seconds, of the 360 that there are
SECONDS = {"driver": 40.0, "scan": 60.0, "torch": 110.0, "jax": 70.0, "emulated": 75.0}
"""The limit of a step; of any other `SHORT`."""
SHORT = 45.0
RESERVE = 20.0
"""For the rows after the scan."""
SMALL = 128 << 20  # bytes of a library whose code is loaded, all of it
MOST = 40  # libraries
CPU_BUILDS = dict.fromkeys(("onnxruntime", "tensorflow-cpu"), "it is built for CPUs")
PASSED, FAILED, NOT_RUN = "passed", "failed", "not-run"
NOT_FINISHED = "not-finished"


@dataclass
class Row:
    """One line of a part. `numbers` by name."""

    part: str
    name: str
    state: str
    detail: str
    seconds: float = 0.0
    numbers: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Bench:
    """`python` has the frameworks of the machine, `folder` is scratch, `end` when all must be over.

    `found` is what `compat` says (scanned.py), empty where it is not known (yet). `ran` are the rows of each
    framework that ran, by distribution.
    """

    python: str
    folder: Path
    end: float
    level: str = table.QUICK
    left_out: tuple[str, ...] = ()
    found: dict[str, Any] = field(default_factory=dict)
    ran: dict[str, list[Row]] = field(default_factory=dict)

    @property
    def left(self) -> float:
        return max(self.end - time.monotonic(), 1.0)

    def limit(self, step: str) -> float:
        return min(SECONDS.get(step, SHORT), self.left)


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


# --- the suite, outside of any image -------------------------------------------------------------


def run_suite(
    bench: Bench, suite: Path, framework: str, packages: Mapping[str, str], limit: float
) -> dict[str, Any]:
    """The suite's report of this machine's own Python. `ended` is why checks may have no row."""
    expectations = write_asked(bench, framework, packages, bench.level)
    report = expectations.with_name("report.json")
    command = [bench.python, "-I", "-B", str(suite / "verify.py"), str(expectations), str(report)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        ended = f"the suite ended with {process.wait(timeout=limit)} before it"
    except subprocess.TimeoutExpired:
        ended = f"its {limit:.0f} seconds were over before it"
        process.terminate()  # it ends its own part
        try:
            process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            process.kill()
    try:
        document = dict(json.loads(report.read_text()))
    except (OSError, ValueError):
        document = {"checks": [], "device": None, "cuda": ""}
    return {**document, "ended": ended}


def write_asked(bench: Bench, framework: str, packages: Mapping[str, str], level: str) -> Path:
    """The suite's expectations, in a folder of their own."""
    folder = Path(tempfile.mkdtemp(dir=bench.folder))
    asked = {
        "format": table.FORMAT,
        "nonce": folder.name,
        "target": "this machine, outside of any image",
        "framework": framework,
        "version": packages.get(framework, ""),
        "cuda": "",
        "python": "",
        "packages": dict(packages),
        "conda": {},
        "level": level,
        "capability": "",
        "driver": "",
        "predicted": bench.found.get("frameworks", {}).get(framework, {}).get("predicted", {}),
        "rehearsal": False,
    }
    expectations = folder / "expectations.json"
    expectations.write_text(json.dumps(asked))
    return expectations


def rows_of(part: str, report: Mapping[str, Any], checks: tuple[str, ...]) -> Iterator[Row]:
    found = {row["name"]: row for row in report["checks"]}
    for name in checks:
        row = found.get(name)
        if row is None:
            yield Row(part, name, NOT_RUN, report["ended"])
        else:
            detail = f"{row['outcome']}: {row['detail']}" if row["outcome"] else row["detail"]
            yield Row(part, name, row["state"], detail, row["seconds"], row["numbers"])


def installed(bench: Bench) -> dict[str, str]:
    """The distributions of the machine's Python, by PEP 503 name."""
    program = (
        "import importlib.metadata as m, json, re\n"
        "print(json.dumps({re.sub(r'[-_.]+', '-', d.metadata['Name'] or '').lower(): d.version"
        " for d in m.distributions()}))"
    )
    return dict(json.loads(output_of(bench, bench.python, "-I", "-c", program)))


def output_of(bench: Bench, *command: str) -> str:
    """What a short step prints. Raises subprocess.SubprocessError."""
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=bench.limit("short"))
    return done.stdout


def of_machine(bench: Bench) -> Iterator[Row]:
    """The suite against frameworks that are installed here: a report, never a verdict."""
    packages, tried = installed(bench), set()
    for distribution, name in frameworks.FRAMEWORKS.items():
        if distribution not in packages or name in tried:
            continue
        tried.add(name)
        part = f"{distribution} {packages[distribution]}"
        known = bench.found.get("frameworks", {}).get(distribution, {})
        if reason := known.get("cpu") or CPU_BUILDS.get(distribution):
            yield Row(part, "all", NOT_RUN, reason)
            continue
        say(f"{part} ...")
        # What another framework brought: CuPy has not used cuDNN since 14, and what is locked must be loaded.
        other = ("nvidia-cudnn",) if name == "cupy" else ()
        own = {key: version for key, version in packages.items() if not key.startswith(other)}
        checks = tuple(
            check
            for check in table.checks_of(bench.level)
            if check not in table.PARTS["driver"] and not table.not_applicable(name, check, own)
        )
        report = run_suite(bench, SUITE, distribution, own, bench.limit(name))
        bench.ran[distribution] = list(rows_of(part, report, checks))
        yield from bench.ran[distribution]
    for name in sorted(set(frameworks.FRAMEWORKS.values()) - tried):
        yield Row(name, "all", NOT_RUN, f"{bench.python} has none")


def held_against(part: str, known: Mapping[str, Any], rows: list[Row]) -> Iterator[Row]:
    """Each answer of `compat` for this GPU and driver, held against what ran: a product of matrices."""
    ran = next(
        (row for row in rows if row.name == "matmul"), Row(part, "matmul", NOT_RUN, "not in this level")
    )
    # Without a known driver, an answer holds for a driver that is new enough.
    no_code = (table.NO_KERNEL, *((table.DRIVER_TOO_OLD,) if known["driver"] else ()))
    missing = ran.state == FAILED and ran.detail.startswith(no_code)
    happened = "it ran" if ran.state == PASSED else f"{ran.state}, {ran.detail}"
    answers = [*known["tables"], {"title": "scan", **known["scan"]}]
    for answer in answers:
        says = f"{answer['answer']} ({'; '.join(answer.get('claims') or [answer.get('reason', '')])})"
        if answer["runs"] is None or answer["answer"] == "unknown":
            state = NOT_RUN
        elif ran.state == PASSED:
            state = PASSED if answer["runs"] else FAILED
        elif missing:
            state = FAILED if answer["runs"] else PASSED
        else:
            state = NOT_RUN  # what failed is not about code for this GPU
        yield Row(f"compat, {part}", answer["title"], state, f"it says {says}; {happened}")


def compat(bench: Bench) -> Iterator[Row]:
    if not bench.found:
        yield Row("compat", "all", NOT_RUN, "what compat says is not known, see the part scan")
        return
    for distribution, rows in bench.ran.items():
        yield from held_against(rows[0].part, bench.found["frameworks"][distribution], rows)


@dataclass
class Scan:
    """scanned.py reads gigabytes: it starts before other steps, and its answers count when they come."""

    bench: Bench
    process: subprocess.Popen[bytes]
    began: float

    @classmethod
    def start(cls, bench: Bench, capability: str, driver: str) -> Scan:
        command = [sys.executable, "-B", str(SCANNED), bench.python, capability, driver]
        with (bench.folder / "scan.log").open("wb") as log:
            process = subprocess.Popen(
                [*command, str(bench.folder / "scan.json")], stdout=subprocess.DEVNULL, stderr=log
            )
        return cls(bench, process, time.monotonic())

    def wait(self, limit: float, *, last: bool) -> Iterator[Row]:
        """A row when it has ended, or with `last` in any case."""
        if self.bench.found:
            return
        try:
            code = self.process.wait(timeout=limit)
        except subprocess.TimeoutExpired:
            if last:
                self.process.kill()
                self.process.wait()
                yield Row("scan", "compat", NOT_RUN, "the time was over before its end")
            return
        took = round(time.monotonic() - self.began, 1)
        if code and last:
            lines = (self.bench.folder / "scan.log").read_text(errors="replace").splitlines()
            yield Row("scan", "compat", FAILED, lines[-1] if lines else f"it ended with {code}", took)
        elif not code:
            self.bench.found.update(json.loads((self.bench.folder / "scan.json").read_text()))
            libraries = self.bench.found["libraries"]
            yield Row("scan", "compat", PASSED, f"{len(libraries)} libraries with GPU code", took)


def emulated_steps(bench: Bench, device: Mapping[str, Any]) -> Iterator[Row]:
    """This GPU's profile, and how far what is emulated by it is off."""
    from tests.gpu import emulated

    packages = installed(bench)
    if "torch" not in packages:
        yield Row("emulated", "all", NOT_RUN, f"{bench.python} has no torch")
        return
    if reason := bench.found.get("frameworks", {}).get("torch", {}).get("cpu"):
        yield Row("emulated", "all", NOT_RUN, reason)
        return
    expectations = write_asked(bench, "torch", packages, table.FULL)
    row = emulated.record(bench.python, SUITE, expectations, device, bench.limit("emulated"))
    yield from rows_of("emulated", {"checks": [row], "ended": ""}, ("profile",))
    if row["state"] != PASSED:
        return
    began = time.monotonic()
    limit = bench.limit("emulated")
    steps = emulated.emulate(bench.python, SUITE, row["numbers"], device, expectations.parent, limit)
    for name, detail, numbers in emulated.compare(row["numbers"], steps):
        yield Row("emulated", name, PASSED, detail, round(time.monotonic() - began, 1), numbers)


# --- the host, as `verify` reads it --------------------------------------------------------------

HOST = """
import json, subprocess, sys
sys.path.insert(0, sys.argv[1])
from imagefactory.errors import ImagefactoryError
from imagefactory.runtime.devices import find_gpus
from imagefactory.verify.kit.hardware import NoGpu, read_hardware
rows, driver = [], ""
try:
    seen = read_hardware()
    driver = seen["driver"]
    rows.append(["evidence", True, json.dumps(seen)])
except NoGpu as error:
    rows.append(["evidence", False, str(error)])
try:
    rows.append(["driver libraries", True, " ".join(find_gpus().libraries)])
except ImagefactoryError as error:
    rows.append(["driver libraries", False, str(error)])
command = ["unshare", "-m", "-p", "-n", "-f", "--mount-proc", "true"]
done = subprocess.run(command, capture_output=True, text=True)
rows.append(["namespaces", not done.returncode, done.stderr.strip() or "unshare can start a sandbox"])
print(json.dumps([driver, rows]))
"""


def host(bench: Bench) -> tuple[str, list[Row]]:
    """The version of the driver, empty if it is not known, and what `verify` needs of this machine."""
    driver, rows = json.loads(output_of(bench, sys.executable, "-B", "-c", HOST, str(ROOT)))
    return driver, [Row("host", name, PASSED if good else FAILED, detail) for name, good, detail in rows]


# --- negative controls ---------------------------------------------------------------------------


def controls(bench: Bench, capability: str) -> Iterator[Row]:
    wrong = bench.folder / "wrong"
    shutil.copytree(SUITE, wrong, ignore=shutil.ignore_patterns("__pycache__"))
    source = wrong / "gpu/kernels.py"
    text = source.read_text()
    changed = text.replace('"add.rn.f32", "sub.rn.f32"', '"sub.rn.f32", "sub.rn.f32"')
    assert changed != text
    source.write_text(changed)
    report = run_suite(bench, wrong, "none", {}, bench.limit("driver"))
    outcome = next((row["outcome"] for row in report["checks"] if row["state"] == FAILED), "nothing")
    good = outcome == table.WRONG_NUMBERS
    yield Row("controls", "a wrong kernel", PASSED if good else FAILED, f"the suite says {outcome}")

    future = bench.folder / "future.ptx"
    future.write_text(kernels.PTX.add.replace("sm_50", "sm_999"))
    assembler = find_ptxas(bench)
    tries = {"PTX for a GPU to come": (future, False)}
    if assembler:
        own, other = capability.replace(".", ""), "80" if capability != "8.0" else "90"
        tries["machine code for this GPU"] = (assemble(bench, assembler, own), True)
        tries["machine code for another GPU alone"] = (assemble(bench, assembler, other), False)
    else:
        yield Row("controls", "machine code for another GPU alone", NOT_RUN, "there is no ptxas here")
    for name, (file, loads) in tries.items():
        answers = ask_driver(bench, "loads", str(file)).get(str(file), {}) if file.exists() else {}
        good = set(answers) == {"0"} if loads else bool(answers) and "0" not in answers
        yield Row("controls", name, PASSED if good else FAILED, f"the driver answers {answers or 'nothing'}")


def find_ptxas(bench: Bench) -> str:
    program = "import sysconfig; print(sysconfig.get_path('purelib'))"
    site = output_of(bench, bench.python, "-I", "-c", program).strip()
    places = (
        f"{site}/nvidia/*/bin/ptxas",
        f"{site}/triton/backends/nvidia/bin/ptxas",
        "/usr/local/cuda*/bin/ptxas",
    )
    found = [path for place in places for path in sorted(glob.glob(place))]  # noqa: PTH207
    return shutil.which("ptxas") or (found[0] if found else "")


def assemble(bench: Bench, assembler: str, target: str) -> Path:
    """Machine code of the suite's kernel for one target alone; there is no file where ptxas cannot."""
    source, made = bench.folder / "add.ptx", bench.folder / f"sm_{target}.cubin"
    source.write_text(kernels.PTX.add)
    command = [assembler, f"-arch=sm_{target}", str(source), "-o", str(made)]
    subprocess.run(command, capture_output=True, timeout=bench.limit("short"))
    return made


def ask_driver(bench: Bench, question: str, *files: str) -> dict[str, Any]:
    """What on_driver.py prints, in a process of its own; empty where it did not come to its end."""
    command = [sys.executable, "-B", str(ON_DRIVER), str(SUITE), question, *files]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=bench.limit("short"))
    except subprocess.TimeoutExpired:
        return {}
    return dict(json.loads(done.stdout)) if done.returncode == 0 else {}


# --- predictions, latencies ----------------------------------------------------------------------


def predictions(bench: Bench) -> Iterator[Row]:
    """Of each small library with GPU code: how many of its modules should load here, and how many do."""
    if not bench.found:
        yield Row("predictions", "all", NOT_RUN, "the libraries are not known, see the part scan")
        return
    site, count = Path(bench.found["site"]), 0
    for name, (every, serves) in bench.found["libraries"].items():
        path = site / name
        if count == MOST or bench.left < 10:
            yield Row("predictions", "all others", NOT_RUN, f"the time, or {MOST} libraries, are used up")
            return
        if not path.is_file() or path.stat().st_size > SMALL or ".so" not in path.name:
            continue
        count += 1
        answers = ask_driver(bench, "loads", str(path)).get(str(path))
        if answers is None:
            yield Row("predictions", name, FAILED, "the driver's process did not come to its end")
            continue
        loads = answers.get("0", 0)
        numbers = {"modules": every, "predicted": serves, "loaded": loads}
        detail = f"{serves} of {every} modules should load, {loads} do (answers {answers})"
        yield Row("predictions", name, PASSED if loads == serves else FAILED, detail, numbers=numbers)
    if not count:
        yield Row(
            "predictions", "all", NOT_RUN, f"no library of up to {SMALL >> 20} MiB in {site} holds GPU code"
        )


def latencies(bench: Bench) -> Iterator[Row]:
    found = ask_driver(bench, "latencies")
    if not found:
        yield Row("latencies", "all", FAILED, "the driver's process did not come to its end")
    for name, took in found.items():
        yield Row(
            "latencies", name, PASSED, f"p50 {took['p50']:.4f} ms, p95 {took['p95']:.4f} ms", numbers=took
        )


# --- all of it -----------------------------------------------------------------------------------


@dataclass
class Report:
    """What was found of the machine (`device` is None without a GPU), and all rows, written as they come."""

    folder: Path
    began: float
    rows: list[Row] = field(default_factory=list)
    machine: dict[str, Any] = field(default_factory=lambda: {"device": None, "cuda": "", "driver": ""})
    outcome: str = NOT_FINISHED

    def add(self, row: Row) -> None:
        say(f"{row.part}: {row.name}: {row.state} - {row.detail[:160]}")
        self.rows.append(row)
        self.write()

    def write(self) -> None:
        document = {
            "format": 1,
            "outcome": self.outcome,
            "seconds": round(time.monotonic() - self.began, 1),
            **self.machine,
            "rows": [asdict(row) for row in self.rows],
        }
        for name, text in (
            ("report.json", json.dumps(document, indent=1) + "\n"),
            ("report.md", markdown(document)),
        ):
            new = self.folder / f".{name}"
            new.write_text(text)
            new.replace(self.folder / name)


def collect(bench: Bench, report: Report) -> None:
    def run(name: str, part: Callable[[], Iterator[Row]]) -> None:
        """A part that breaks is a failed row, and the others go on."""
        if not capability or name in bench.left_out:
            why = "left out by --skip" if capability else "there is no GPU to ask"
            report.add(Row(name, "all", NOT_RUN, why))
            return
        if bench.left <= 1:
            report.add(Row(name, "all", NOT_RUN, "the time was over before it"))
            return
        try:
            for row in part():
                report.add(row)
        except subprocess.TimeoutExpired as error:
            report.add(Row(name, "all", NOT_RUN, f"{error.timeout:.0f} seconds were over before its end"))
        except Exception as error:  # whatever a machine that nobody has seen does
            report.add(Row(name, "all", FAILED, f"it broke off: {type(error).__name__}: {error}"))

    found = run_suite(bench, SUITE, "none", {}, bench.limit("driver"))
    device = found["device"]
    report.machine.update(device=device, cuda=found["cuda"])
    for row in rows_of("driver", found, table.PARTS["driver"]):
        report.add(row)
    capability = device["capability"] if device else ""

    def read_host() -> Iterator[Row]:
        report.machine["driver"], rows = host(bench)
        yield from rows

    run("host", read_host)
    scan = None
    if capability and "scan" not in bench.left_out:
        scan = Scan.start(bench, capability, report.machine["driver"])
    run("controls", lambda: controls(bench, capability))
    run("latencies", lambda: latencies(bench))
    if scan:
        waiting = scan.wait(bench.limit("scan"), last=False)
        run("scan", lambda: waiting)
    run("machine", lambda: of_machine(bench))
    run("emulated", lambda: emulated_steps(bench, device))
    if scan:
        rest = scan.wait(max(bench.left - RESERVE, 1.0), last=True)
        run("scan", lambda: rest)
    run("compat", lambda: compat(bench))
    run("predictions", lambda: predictions(bench))


def markdown(document: Mapping[str, Any]) -> str:
    device = document["device"]
    name = f"{device['name']}, {device['capability']}" if device else "no GPU"
    lines = [
        f"# {name}, driver for CUDA {document['cuda'] or '?'}",
        "",
        f"{document['outcome']}, {document['seconds']:.0f} s. What ran outside of an image verifies nothing.",
        "",
        "| part | what | state | seconds | detail |",
        "|---|---|---|---|---|",
    ]
    for row in document["rows"]:
        cells = (row["part"], row["name"], row["state"], f"{row['seconds']:.1f}", row["detail"])
        lines.append("| " + " | ".join(" ".join(cell.split()).replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="tests/run gpu", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--output", type=Path, default=ROOT / "build/gpu", help="the folder of the two files")
    parser.add_argument(
        "--python", default=shutil.which("python3") or sys.executable, help="has the frameworks"
    )
    parser.add_argument("--skip", action="append", default=[], help="a part")
    parser.add_argument("--level", choices=tuple(table.LEVELS), default=table.QUICK)
    given = parser.parse_args(arguments)
    given.output.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    report = Report(given.output, began)
    with tempfile.TemporaryDirectory(prefix="gpu-") as folder:
        bench = Bench(given.python, Path(folder), began + TOTAL, given.level, tuple(given.skip))
        collect(bench, report)
    failed = [row for row in report.rows if row.state == FAILED]
    report.outcome = FAILED if failed else PASSED
    if report.machine["device"] is None:
        report.outcome = next((row.detail.partition(":")[0] for row in failed), table.NO_GPU)
    report.write()
    print(f"{report.outcome}: {given.output}/report.md and report.json")
    if report.machine["device"] is None:
        return 9
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
