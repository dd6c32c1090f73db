"""`make mutants`: do tests notice a changed product? `python -m tests.mutants [--seed N] [FILE:LINE ...]`

Draws places of imagefactory by a seed: each room its share by lines, at least one. At each it takes one
change of mutmut's operators (a comparison, a constant, an argument, a dropped `not`, ...), makes it in a
copy of the tree, and runs unit tests until one fails: the mirror test file, then files that run this line
when nothing is changed (coverage tells), then the room's others. Fewer than 85 % noticed: exit code 1. The
score is a lower bound: tests/engines and tests/e2e, which reach what needs an engine, root or a GPU, are
not asked.

Left out, as no test should notice it: docstrings, wording (strings with a blank, any string in a `raise`)
and upper or lower case in strings; annotations, names of types, options of `dataclass`, `__all__`, `if
TYPE_CHECKING` and `if __name__`; `metavar`; `encoding`, the same wherever tests run; `strict`, which
guards what cannot be; one false value for another.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from functools import cache
from importlib.util import cache_from_source
from pathlib import Path
from typing import Any, NamedTuple, cast

import coverage
import libcst as cst
from libcst import matchers as m
from libcst.metadata import MetadataWrapper, PositionProvider
from mutmut.mutation.mutators import mutation_operators, operator_arg_removal, operator_string

ROOT = Path(__file__).parents[1]
WANTED = 0.85
# The slowest test takes some seconds: one that takes a minute hangs. The whole of them take some minutes.
PYTEST = ["-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--tb=no"]
PYTEST += ["--timeout=60", "--timeout-method=thread"]  # a signal ends one try, and hypothesis tries again
LONGEST = 900
FALSE = {"None", "False", "0", '""', "()", "[]", "{}"}
STRING = m.SimpleString() | m.FormattedString()
UNSEEN = (
    m.Annotation()
    | m.Subscript(value=m.Name("Literal"))
    | m.Expr(value=m.SimpleString() | m.ConcatenatedString())
    | m.Decorator(decorator=m.Name("dataclass") | m.Call(func=m.Name("dataclass")))
    | m.If(test=m.Name("TYPE_CHECKING") | m.Comparison(left=m.Name("__name__")))
    | m.Assign(targets=[m.AssignTarget(m.Name(m.MatchRegex("__all__|[A-Z][A-Za-z]*[a-z]")))])
    | m.Arg(keyword=m.Name(m.MatchRegex("encoding|strict|metavar")))
)


class Change(NamedTuple):
    file: str
    line: int
    operator: Any
    old: cst.CSTNode
    new: cst.CSTNode
    module: cst.Module
    at_import: bool

    @property
    def name(self) -> str:
        return str(self.operator.__name__).removeprefix("operator_")

    def code(self) -> str:
        return cast(cst.Module, self.module.deep_replace(self.old, self.new)).code

    def __str__(self) -> str:
        lines = difflib.ndiff(self.module.code.splitlines(), self.code().splitlines())
        changed = [f"\n    {line[0]} {line[2:].strip()}" for line in lines if line[0] in "+-"]
        return f"{self.file}:{self.line} {self.name}" + "".join(changed)


@cache
def changes(file: str) -> list[Change]:
    """All that can be changed in a file, minus what no test should notice."""
    wrapper = MetadataWrapper(cst.parse_module((ROOT / file).read_text()))
    places = wrapper.resolve(PositionProvider)
    found: list[Change] = []

    def code(node: Any) -> str:
        return wrapper.module.code_for_node(node).strip()

    def wording(node: cst.CSTNode, raised: bool) -> bool:
        return any(raised or " " in code(string) for string in m.findall(node, STRING))

    def pointless(operator: object, old: Any, new: Any, raised: bool) -> bool:
        if operator is operator_arg_removal:
            gone = next(arg for arg in old.args if arg not in new.args)
            return m.matches(gone, UNSEEN) or code(gone.value) in FALSE or wording(gone.value, raised)
        if isinstance(old, cst.Assign | cst.AnnAssign):
            return code(old.value) in FALSE
        return operator is operator_string and wording(old, raised)

    def visit(node: cst.CSTNode, raised: bool, at_import: bool) -> None:
        if m.matches(node, UNSEEN) or (raised and isinstance(node, cst.FormattedString)):
            return
        raised = raised or isinstance(node, cst.Raise)
        for operator in (operator for kind, operator in mutation_operators if isinstance(node, kind)):
            # Of a string's three changes the first alone is not one of upper and lower case.
            for new in list(operator(node))[: 1 if operator is operator_string else None]:
                if not pointless(operator, node, new, raised):
                    line = places[node].start.line
                    found.append(Change(file, line, operator, node, new, wrapper.module, at_import))
        for child in node.children:
            body = isinstance(node, cst.FunctionDef) and child is node.body
            visit(child, raised, at_import and not body)

    visit(wrapper.module, raised=False, at_import=True)
    return found


def room_of(file: str) -> str:
    return Path(file).parts[1].removesuffix(".py")


def draw(seed: int, places: int) -> list[Change]:
    """One change at each of so many lines. What a room gives does not depend on the other rooms' files."""
    rooms: dict[str, dict[str, int]] = {}
    for path in sorted((ROOT / "imagefactory").rglob("*.py")):
        file = str(path.relative_to(ROOT))
        if not room_of(file).startswith("__"):
            rooms.setdefault(room_of(file), {})[file] = path.read_text().count("\n")
    shares = dict.fromkeys(rooms, 1)
    while sum(shares.values()) < places:
        shares[max(rooms, key=lambda room: sum(rooms[room].values()) / shares[room])] += 1
    drawn: dict[tuple[str, int], Change] = {}
    for room, files in rooms.items():
        chance = random.Random(f"{seed} {room}")
        wanted = len(drawn) + shares[room]
        for _ in range(100):  # a room with hardly any code may have fewer
            if len(drawn) == wanted:
                break
            file = chance.choices(list(files), list(files.values()))[0]
            line = chance.choice(sorted({change.line for change in changes(file)}) or [0])
            here = [change for change in changes(file) if change.line == line]
            # Operators alike: else most would be arguments, of which a call has many.
            name = chance.choice(sorted({change.name for change in here}) or [""])
            if here:
                drawn.setdefault((file, line), chance.choice([one for one in here if one.name == name]))
    return list(drawn.values())


def pytest_runtest_logstart(nodeid: str) -> None:
    """As a plugin of the unchanged run: what runs now, this test file runs."""
    if tracer := coverage.Coverage.current():
        tracer.switch_context(nodeid.partition("::")[0])


def tests_of(change: Change, ran: coverage.CoverageData, copy: Path) -> list[str]:
    measured = next((file for file in ran.measured_files() if file.endswith(f"/{change.file}")), "")
    lines = ran.contexts_by_lineno(measured)
    if not change.at_import:
        # The line of a statement's begin counts for those that it goes on over.
        at = next((at for at in range(change.line, 0, -1) if any(lines.get(at, ()))), 0)
        lines = {at: lines.get(at, [])}
    path = Path("tests/unit", *Path(change.file).parts[1:])
    mirror = path.with_name(f"test_{path.name}")
    room = (copy / "tests/unit" / path.parts[2]).rglob("test_*.py")
    runs = sorted({file for files in lines.values() for file in files if file})
    ordered = [str(mirror), *runs, *sorted(str(path.relative_to(copy)) for path in room)]
    return [file for file in dict.fromkeys(ordered) if (copy / file).exists()]


def run(copy: Path, *arguments: str) -> int:
    """The exit code of Python in the copy; one that lasts too long is ended with its children."""
    environment = {**os.environ, "PYTHONPATH": str(copy)}
    process = subprocess.Popen(
        [sys.executable, *arguments],
        cwd=copy,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        return process.wait(LONGEST)
    except subprocess.TimeoutExpired:
        return -1
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def notices(change: Change, ran: coverage.CoverageData, copy: Path) -> bool:
    path = copy / change.file
    byte_code = Path(cache_from_source(str(path)))
    path.write_text(change.code())
    byte_code.unlink(missing_ok=True)  # its clock of whole seconds may not tell the two apart
    try:
        return run(copy, *PYTEST, *tests_of(change, ran, copy)) != 0
    finally:
        path.write_text(change.module.code)
        byte_code.unlink(missing_ok=True)


def main() -> int:
    parser = argparse.ArgumentParser(description="do the unit tests notice a changed product?")
    parser.add_argument("--seed", type=int, default=1, help="what the places are drawn by")
    parser.add_argument("--places", type=int, default=60)
    parser.add_argument("--ran", type=Path, metavar="FILE", help="keep and use what the unchanged run told")
    parser.add_argument("at", nargs="*", metavar="FILE:LINE", help="all changes there instead")
    asked = parser.parse_args()
    by_hand = [(file, int(line)) for file, _, line in (at.partition(":") for at in asked.at)]
    tried = [c for file, line in by_hand for c in changes(file) if c.line == line]
    tried = tried if asked.at else draw(asked.seed, asked.places)
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        copy = Path(folder).resolve() / "tree"
        for name in subprocess.check_output(["git", "ls-files", "-z"], cwd=ROOT, text=True).split("\0")[:-1]:
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, copy / name, follow_symlinks=False)
        told = (asked.ran or Path(folder, "ran")).absolute()
        cover = ["-m", "coverage", "run", f"--data-file={told}", "--source=imagefactory"]
        if not told.exists() and run(copy, *cover, *PYTEST, "-p", "tests.mutants", "tests/unit"):
            told.unlink(missing_ok=True)
            print("the unit tests fail before anything is changed: see `make unit`", file=sys.stderr)
            return 2
        ran = coverage.CoverageData(str(told))
        ran.read()
        verdicts = []
        for number, change in enumerate(tried, 1):
            verdicts.append((change, notices(change, ran, copy)))
            word = "noticed" if verdicts[-1][1] else "SURVIVED"
            print(f"{number}/{len(tried)} {word} {change}", flush=True)
    return tell(verdicts)


def tell(verdicts: list[tuple[Change, bool]]) -> int:
    tried = Counter(room_of(change.file) for change, _ in verdicts)
    noticed = Counter(room_of(change.file) for change, seen in verdicts if seen)
    print("\nnoticed, by room")
    for room in tried:
        print(f"  {room:<12}{noticed[room]:>3} of {tried[room]}")
    share = noticed.total() / max(1, tried.total())
    print(f"  {'all':<12}{noticed.total():>3} of {tried.total()}: {share:.0%}, wanted {WANTED:.0%}")
    print("\nsurvivors", *(change for change, seen in verdicts if not seen), sep="\n")
    return share < WANTED


if __name__ == "__main__":
    sys.exit(main())
