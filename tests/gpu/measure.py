"""Everything that needs a GPU, within minutes, by what is at hand: `tests/run gpu [--output FOLDER]`.

Writes report.json and report.md. What cannot be done here has a row of its own, `not-run` with its reason.
Only the run in a real image makes a verdict, by a throwaway key that nobody trusts.
Exit code 0 when nothing failed, 1 when something did, 9 without a GPU.
"""

from __future__ import annotations

import argparse
import glob
import json
import os
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

from imagefactory.gpu.capability import parse_capability  # noqa: E402
from imagefactory.gpu.predict import runs  # noqa: E402
from imagefactory.gpu.values import SupportLevel  # noqa: E402
from imagefactory.scan.fatbin import scan_file  # noqa: E402
from imagefactory.suite import table as frameworks  # noqa: E402
from imagefactory.suite.gpu import kernels, table  # noqa: E402
from tests.gpu import emulated  # noqa: E402

SUITE = ROOT / "imagefactory/suite"
ON_DRIVER = Path(__file__).with_name("on_driver.py")
IMAGE = "numba-0.68-cu12"
TOTAL = 450.0  # seconds, of the 480 that there are
SMALL = 128 << 20  # bytes of a library whose code is loaded, all of it
MOST = 40  # libraries
PASSED, FAILED, NOT_RUN = "passed", "failed", "not-run"


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
    """`python` has the frameworks of the machine, `folder` is scratch, `end` when all must be over."""

    python: str
    folder: Path
    end: float
    level: str = table.QUICK
    left_out: tuple[str, ...] = ()

    @property
    def left(self) -> float:
        return max(self.end - time.monotonic(), 1.0)


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


# --- the suite, outside of any image -------------------------------------------------------------


def run_suite(bench: Bench, suite: Path, framework: str, packages: Mapping[str, str]) -> dict[str, Any]:
    """The suite's report of this machine's own Python. What was not reached in time has no row."""
    expectations = write_asked(bench, framework, packages, bench.level)
    report = expectations.with_name("report.json")
    command = [bench.python, "-I", "-B", str(suite / "verify.py"), str(expectations), str(report)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        process.wait(timeout=bench.left)
    except subprocess.TimeoutExpired:
        process.terminate()  # it ends its own part
        process.wait()
    return json.loads(report.read_text()) if report.exists() else {"checks": [], "device": None, "cuda": ""}


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
        "predicted": {},
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
            yield Row(part, name, NOT_RUN, "the time was over before it")
        else:
            detail = f"{row['outcome']}: {row['detail']}" if row["outcome"] else row["detail"]
            yield Row(part, name, row["state"], detail, row["seconds"], row["numbers"])


def installed(python: str) -> dict[str, str]:
    """The distributions of the machine's Python, by PEP 503 name."""
    program = (
        "import importlib.metadata as m, json, re\n"
        "print(json.dumps({re.sub(r'[-_.]+', '-', d.metadata['Name'] or '').lower(): d.version"
        " for d in m.distributions()}))"
    )
    done = subprocess.run([python, "-I", "-c", program], capture_output=True, text=True, check=True)
    return dict(json.loads(done.stdout))


def of_machine(bench: Bench) -> Iterator[Row]:
    """The suite against frameworks that are installed here: a report, never a verdict."""
    packages, tried = installed(bench.python), set()
    for distribution, name in frameworks.FRAMEWORKS.items():
        if distribution not in packages or name in tried:
            continue
        tried.add(name)
        say(f"{distribution} {packages[distribution]} ...")
        part = f"{distribution} {packages[distribution]}"
        checks = tuple(
            check
            for check in table.checks_of(bench.level)
            if check not in table.PARTS["driver"] and not table.not_applicable(name, check, packages)
        )
        yield from rows_of(part, run_suite(bench, SUITE, distribution, packages), checks)
    for name in sorted(set(frameworks.FRAMEWORKS.values()) - tried):
        yield Row(name, "all", NOT_RUN, f"{bench.python} has none")


def emulated_steps(bench: Bench, device: Mapping[str, Any]) -> Iterator[Row]:
    """This GPU's profile, and how far what is emulated by it is off."""
    packages = installed(bench.python)
    if "torch" not in packages:
        yield Row("emulated", "all", NOT_RUN, f"{bench.python} has no torch")
        return
    expectations = write_asked(bench, "torch", packages, table.FULL)
    try:
        row = emulated.record(bench.python, SUITE, expectations, device, bench.left)
    except subprocess.TimeoutExpired:
        yield Row("emulated", "profile", NOT_RUN, "the time was over before it")
        return
    yield from rows_of("emulated", {"checks": [row]}, ("profile",))
    if row["state"] != PASSED:
        return
    began = time.monotonic()
    steps = emulated.emulate(bench.python, SUITE, row["numbers"], device, expectations.parent)
    for name, detail, numbers in emulated.compare(row["numbers"], steps):
        yield Row("emulated", name, PASSED, detail, round(time.monotonic() - began, 1), numbers)


# --- negative controls ---------------------------------------------------------------------------


def controls(bench: Bench, capability: str) -> Iterator[Row]:
    wrong = bench.folder / "wrong"
    shutil.copytree(SUITE, wrong, ignore=shutil.ignore_patterns("__pycache__"))
    source = wrong / "gpu/kernels.py"
    text = source.read_text()
    changed = text.replace('"add.rn.f32", "sub.rn.f32"', '"sub.rn.f32", "sub.rn.f32"')
    assert changed != text
    source.write_text(changed)
    report = run_suite(bench, wrong, "none", {})
    outcome = next((row["outcome"] for row in report["checks"] if row["state"] == FAILED), "nothing")
    good = outcome == table.WRONG_NUMBERS
    yield Row("controls", "a wrong kernel", PASSED if good else FAILED, f"the suite says {outcome}")

    future = bench.folder / "future.ptx"
    future.write_text(kernels.PTX.add.replace("sm_50", "sm_999"))
    assembler = find_ptxas(bench.python)
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


def find_ptxas(python: str) -> str:
    program = "import sysconfig; print(sysconfig.get_path('purelib'))"
    site = subprocess.run(
        [python, "-I", "-c", program], capture_output=True, text=True, check=True
    ).stdout.strip()
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
    subprocess.run([assembler, f"-arch=sm_{target}", str(source), "-o", str(made)], capture_output=True)
    return made


def ask_driver(bench: Bench, question: str, *files: str) -> dict[str, Any]:
    """What on_driver.py prints, in a process of its own; empty where it did not come to its end."""
    command = [sys.executable, "-B", str(ON_DRIVER), str(SUITE), question, *files]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=min(60.0, bench.left))
    except subprocess.TimeoutExpired:
        return {}
    return dict(json.loads(done.stdout)) if done.returncode == 0 else {}


# --- predictions, latencies, a real image --------------------------------------------------------


def predictions(bench: Bench, capability: str) -> Iterator[Row]:
    """Of each small library with GPU code: how many of its modules should load here, and how many do."""
    here = parse_capability(capability)
    program = "import sysconfig; print(sysconfig.get_path('purelib'))"
    site = subprocess.run(
        [bench.python, "-I", "-c", program], capture_output=True, text=True, check=True
    ).stdout.strip()
    count = 0
    for path in sorted(Path(site).rglob("*.so*")):
        if count == MOST or bench.left < 90:
            yield Row("predictions", "all others", NOT_RUN, f"the time, or {MOST} libraries, are used up")
            return
        if path.is_symlink() or not path.is_file() or not 4096 < path.stat().st_size <= SMALL:
            continue
        name = path.relative_to(site).as_posix()
        library = scan_file(path, name)
        if library is None or not library.modules:
            continue
        count += 1
        serves = sum(
            modules.count
            for modules in library.modules
            if any(runs(code, here) in (SupportLevel.NATIVE, SupportLevel.PTX) for code in modules.codes)
        )
        every = sum(modules.count for modules in library.modules)
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


def in_image(bench: Bench) -> Iterator[Row]:
    """The whole suite in a real image, by `verify`, with a verdict under a key of this run alone."""
    program = ROOT / ".venv/bin/imagefactory"
    if not program.exists():
        yield Row("image", IMAGE, NOT_RUN, "there is no .venv with the project's dependencies (./setup.sh)")
        return
    home = bench.folder / "home"
    environ = {**os.environ, "XDG_CONFIG_HOME": str(home)}

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        command = [str(program), "-C", str(ROOT), *words]
        return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=bench.left)

    steps = (
        ("build", "build", IMAGE),
        ("key", "keys", "new", "throwaway"),
        ("verify", "verify", IMAGE, "--suite", bench.level),
    )
    for name, *words in steps:
        began = time.monotonic()
        try:
            done = run(*words)
        except subprocess.TimeoutExpired:
            yield Row("image", name, NOT_RUN, "the time was over before its end")
            return
        told = " ".join((done.stderr if done.returncode else done.stdout).split())[-400:]
        state = PASSED if done.returncode == 0 else NOT_RUN if name == "build" else FAILED
        yield Row(
            "image", name, state, f"exit code {done.returncode}: {told}", round(time.monotonic() - began, 1)
        )
        if done.returncode:
            return


# --- all of it -----------------------------------------------------------------------------------


def collect(bench: Bench) -> tuple[dict[str, Any], list[Row]]:
    """What was found of the machine (`device` is None without a GPU), and all rows."""
    report = run_suite(bench, SUITE, "none", {})
    machine = {"device": report["device"], "cuda": report["cuda"]}
    rows = list(rows_of("driver", report, table.PARTS["driver"]))
    capability = report["device"]["capability"] if report["device"] else ""
    parts: dict[str, Callable[[], Iterator[Row]]] = {
        "controls": lambda: controls(bench, capability),
        "latencies": lambda: latencies(bench),
        "image": lambda: in_image(bench),
        "emulated": lambda: emulated_steps(bench, report["device"]),
        "predictions": lambda: predictions(bench, capability),
        "machine": lambda: of_machine(bench),
    }
    for name, part in parts.items():
        if not capability or name in bench.left_out:
            why = "left out by --skip" if capability else "there is no GPU to ask"
            rows.append(Row(name, "all", NOT_RUN, why))
            continue
        for row in part():
            say(f"{row.part}: {row.name}: {row.state} - {row.detail[:160]}")
            rows.append(row)
    return machine, rows


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
    with tempfile.TemporaryDirectory(prefix="gpu-") as folder:
        bench = Bench(given.python, Path(folder), began + TOTAL, given.level, tuple(given.skip))
        machine, rows = collect(bench)
    failed = [row for row in rows if row.state == FAILED]
    outcome = FAILED if failed else PASSED
    if machine["device"] is None:
        outcome = next((row.detail.partition(":")[0] for row in failed), table.NO_GPU)
    document = {
        "format": 1,
        "outcome": outcome,
        "seconds": round(time.monotonic() - began, 1),
        **machine,
        "rows": [asdict(row) for row in rows],
    }
    (given.output / "report.json").write_text(json.dumps(document, indent=1) + "\n")
    (given.output / "report.md").write_text(markdown(document))
    print(f"{outcome}: {given.output}/report.md and report.json")
    if machine["device"] is None:
        return 9
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
