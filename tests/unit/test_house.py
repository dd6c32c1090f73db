"""The house's rules that docs/architecture.md states: which way imports run."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import grimp
from importlinter.cli import lint_imports

from imagefactory.settings.choices import ENGINES, RUNNERS
from tests.made.source import FILES, HOUSE, calls, nodes, parse

ROOT = HOUSE.parent
ENTRIES = 35
# What the light install alone does not bring.
EXTRAS = {"classad2", "conda_lock", "cryptography", "docker", "htcondor2", "installer", "isal", "jinja2"} | {
    *("cyclonedx", "license_expression", "packageurl", "spdx_tools"),
    *("pypi_attestations", "rattler", "rich", "sigstore", "spython", "tomlkit", "uv", "zstandard"),
}
# What it brings, and what quick commands do not wait for: up to a tenth of a second each.
SLOW = {
    "certifi",
    "http",
    "importlib.metadata",
    "packaging.requirements",
    "requests",
    "securesystemslib",
    "ssl",
    "tenacity",
    "urllib3",
}
# What builds, fetches or explains. What finds images imports it when there is something to do.
WORKERS = {
    "imagefactory.actions.catalog",
    "imagefactory.build.assembly",
    "imagefactory.build.base.fetch",
    "imagefactory.build.base.make",
    "imagefactory.build.conda_install",
    "imagefactory.build.sif",
    "imagefactory.lock.conda.locker",
    "imagefactory.lock.conda.own_tool",
    "imagefactory.lock.download",
    "imagefactory.runtime.apptainer_command",
    "imagefactory.trust.approval",
    "imagefactory.trust.catalog_package",
    "imagefactory.verify.smoke_hints",
}
# Programs that run elsewhere, where what they import may be missing or slow.
TRAVELS = [
    HOUSE / name
    for name in (
        "extras/emulate/inside",
        "suite",
        "verify/kit",
        "schedulers/htcondor/node",
        "runtime/sandbox",
        "build/conda_install.py",
        "build/pyc_server.py",
        "extras/wheels/wheel_builder.py",
    )
]


# What reads folders that an untrusted program filled, besides what shows one to an image to write.
READERS = [
    HOUSE / name
    for name in (
        "build/conda/prefix.py",
        "lock/pypi/sources.py",
        "schedulers/faults.py",
        "schedulers/slurm/results.py",
        "verify/kit/program.py",
        "verify/outcome.py",
    )
]
# Calls that follow links, block on a FIFO or read without end. trees.py has what does not.
TRUSTING = {"glob", "rglob", "iterdir", "read_bytes", "read_text", "listdir", "scandir", "walk", "copytree"}


def named(path: Path) -> str:
    return str(path.relative_to(ROOT))


def imports_inside(path: Path) -> Iterator[str]:
    """`file:line: module` of each import inside a function."""

    def search(node: ast.AST, inside: bool) -> Iterator[str]:
        if inside and isinstance(node, ast.Import | ast.ImportFrom):
            names = (
                [node.module or "."] if isinstance(node, ast.ImportFrom) else [one.name for one in node.names]
            )
            for module in names:
                yield f"{named(path)}:{node.lineno}: {module}"
        for child in ast.iter_child_nodes(node):
            yield from search(child, inside or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))

    return search(parse(path), inside=False)


def test_imports_run_as_the_contract_says(tmp_path: Path) -> None:
    assert lint_imports(config_filename=str(ROOT / "pyproject.toml"), cache_dir=str(tmp_path)) == 0


def test_no_files_import_each_other_in_a_circle(tmp_path: Path) -> None:
    graph = grimp.build_graph("imagefactory", cache_dir=str(tmp_path))
    below = {name: graph.find_modules_directly_imported_by(name) for name in graph.modules}
    TopologicalSorter(below).prepare()  # raises CycleError, which names them


def test_the_first_look_shows_few_things() -> None:
    entries = [path for path in HOUSE.iterdir() if not path.name.startswith("__")]
    assert len(entries) <= ENTRIES


def test_imports_stand_at_the_top_of_a_file() -> None:
    """Commands and access.py import what they need as they run, to start fast; extras may be missing.

    For the same reason WORKERS are imported where they work.
    """
    rooms = [
        path
        for path in FILES
        if not any(path.is_relative_to(HOUSE / room) for room in ("cli", "extras"))
        and path != HOUSE / "access.py"
    ]
    late = [
        line
        for path in rooms
        if not any(path.is_relative_to(place) for place in TRAVELS)
        for line in imports_inside(path)
        if not {(module := line.rsplit(": ", 1)[1]), module.split(".")[0]} & (EXTRAS | SLOW | WORKERS)
    ]
    assert late == []


def test_the_light_install_starts_without_what_it_does_not_bring() -> None:
    blocked = f"import sys; sys.modules |= dict.fromkeys({sorted(EXTRAS)})"
    program = f"{blocked}; from imagefactory.cli import cli; cli.commands; print(len(sys.modules))"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 250  # actions are imported when they run


def test_a_base_is_installed_without_packages_of_pypi() -> None:
    program = f"import sys; sys.path.insert(0, {str(ROOT)!r}); import imagefactory.build.base.make"
    ended = subprocess.run([sys.executable, "-S", "-c", program], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr


# Programs of their own: no terminal is theirs, or a person of this house's.
PROGRAMS = [
    *TRAVELS,
    *(
        HOUSE / name
        for name in (
            "build/conda/link.py",
            "runtime/spython_child.py",
            "actions/scan_wheels.py",
        )
    ),
]
# Where texts for people are made fit for a terminal.
SPEAKERS = {HOUSE / "cli" / "output.py", HOUSE / "logs.py", HOUSE / "progress.py"}


def writes(path: Path) -> Iterator[str]:
    """`file:line` of what writes to stdout or stderr, or asks at the terminal."""
    speaks = r"print|input|click\.(s?echo|confirm|prompt|echo_via_pager)|rich\.(print|Console)"
    for call, name in calls(path):
        to_terminal = name == "os.write" and ast.unparse(call.args[0]) in ("1", "2")
        if to_terminal or re.fullmatch(speaks, name):
            yield f"{named(path)}:{call.lineno}"
    for node in nodes(path):
        texts = []
        if isinstance(node, ast.Attribute) and re.fullmatch(r"sys\.(std(out|err))\..+", ast.unparse(node)):
            texts = [] if node.attr in ("isatty", "flush", "fileno") else ["print"]
        elif isinstance(node, ast.ImportFrom) and node.module:
            texts = [f"{node.module.partition('.')[0]}.{one.name}" for one in node.names]
        if any(re.fullmatch(speaks, text) for text in texts):
            yield f"{named(path)}:{getattr(node, 'lineno', 0)}"


def test_three_places_write_to_the_terminal() -> None:
    """They alone take out what steers it, of texts that strangers wrote."""
    found = [
        line
        for path in FILES
        if path not in SPEAKERS and not any(path.is_relative_to(place) for place in PROGRAMS)
        for line in writes(path)
    ]
    assert found == []
    assert all(list(writes(path)) for path in SPEAKERS)


def test_tests_share_by_way_of_made_and_services() -> None:
    """A file of tests or of fixtures that another imports runs or changes with it."""
    found = [
        f"{named(path)}: {line}"
        for path in sorted((ROOT / "tests").rglob("*.py"))
        for line in path.read_text().splitlines()
        if re.match(r"\s*from tests\.(\w+\.)*(test_\w+|conftest) import|.*noqa: F811", line)
        and path != Path(__file__)
    ]
    assert found == []


def test_no_program_gets_the_callers_stdin() -> None:
    """It could read a script that a shell reads from there. A runner's own command alone is given it."""
    gives = {HOUSE / "runtime/docker.py", HOUSE / "suite"}  # inside an image stdin is empty already
    found = [
        f"{named(path)}:{node.lineno}"
        for path in FILES
        if not any(path.is_relative_to(place) for place in gives)
        for node, name in calls(path)
        if re.fullmatch(r"subprocess\.(run|Popen|call|check_\w+)", name)
        and not {"stdin", "input"} & {keyword.arg for keyword in node.keywords}
    ]
    assert found == []


def shows_a_folder_to_write(path: Path) -> bool:
    return any(
        name == "suite_mounts"
        or (name == "Mount" and any(keyword.arg == "writable" for keyword in node.keywords))
        for node, name in calls(path)
    )


def trusting_calls(path: Path) -> Iterator[str]:
    """`line: name` of calls that trust a folder, and of `open` for reading."""
    for node, _ in calls(path):
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        of = getattr(getattr(node.func, "value", None), "id", "")
        mode = next((one.value for one in node.args if isinstance(one, ast.Constant)), "r")
        reads = name == "open" and str(mode).startswith("r") and of not in ("tarfile", "archive")
        if name in TRUSTING or reads:
            yield f"{node.lineno}: {name}"


def test_folders_of_untrusted_programs_are_read_by_one_helper() -> None:
    shown = [
        path
        for path in FILES
        if not path.is_symlink()
        and shows_a_folder_to_write(path)
        and "cli" not in path.parts
        and path.name != "suite_files.py"  # mounts a folder for others, which read it
    ]
    assert len(shown) >= 6
    found = [f"{named(path)}:{line}" for path in (*shown, *READERS) for line in trusting_calls(path)]
    assert found == []


def test_commands_name_their_parameters() -> None:
    """A bag of options hides from the type checker what a command reads."""
    bags = [
        f"{named(path)}:{node.lineno}"
        for path in (HOUSE / "cli").rglob("*.py")
        for node in nodes(path)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        if node.args.kwarg or re.search(r":.*\bAny\b", ast.unparse(node.args))
    ]
    assert bags == []


def test_a_class_name_has_one_owner() -> None:
    """Whoever reads a name knows which class it is, in the travelling programs too."""
    owners: dict[str, set[str]] = {}
    for path in FILES:
        if not path.is_symlink():
            for node in nodes(path):
                if isinstance(node, ast.ClassDef):
                    owners.setdefault(node.name, set()).add(named(path))
    assert {name: paths for name, paths in owners.items() if len(paths) > 1} == {}


def test_paths_of_the_package_that_a_text_names_are_there() -> None:
    """A file that moved leaves no sentence behind that leads nowhere."""
    found = [
        f"{named(path)}:{number}: {room}/{file}"
        for path in FILES
        for number, line in enumerate(path.read_text().splitlines(), 1)
        for room, file in re.findall(r"(?<![\w./-])([a-z_]+)/((?:[a-z_]+/)*[a-z_]+\.py)\b", line)
        if (HOUSE / room).is_dir() and not (HOUSE / room / file).exists()
    ]
    assert found == []
    old = re.compile(
        r"(?<![\w./-])(stages|engines|runners|pools|verdicts|catalog|submit|sweeps|render)/\w+\.py"
    )
    assert [named(path) for path in FILES if old.search(path.read_text())] == []


# Participles and function words that name a value: the field's terms say what it is.
VAGUE = "made asked told wanted said kept held given found taken left done shown wish one many"
MOST_FILES, MOST_VAGUE, MOST_VAGUE_DEFINITIONS = 440, 10, 1
"""What there is today. These numbers only become smaller."""


def vague_names(tree: ast.Module) -> tuple[int, int]:
    """Return how many variables (once in each function) and how many definitions have such a name."""
    words = set(VAGUE.split())
    variables = definitions = 0
    for scope in ast.walk(tree):
        if not isinstance(scope, ast.Module | ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            if isinstance(scope, ast.ClassDef):
                definitions += bool(words & set(scope.name.lower().split("_")))
            continue
        names = set()
        if not isinstance(scope, ast.Module):
            names = {row.arg for row in ast.walk(scope.args) if isinstance(row, ast.arg)}
        if isinstance(scope, ast.FunctionDef | ast.AsyncFunctionDef):
            definitions += bool(words & set(scope.name.strip("_").split("_")))
        parts = list(ast.iter_child_nodes(scope))
        while parts:
            node = parts.pop()
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                names.add(node.id)
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda):
                parts += ast.iter_child_nodes(node)
        variables += len(names & words)
    return variables, definitions


def test_names_become_plainer_and_files_fewer() -> None:
    files = [path for path in FILES if not path.is_symlink()]
    counts = [vague_names(parse(path)) for path in files]
    assert len(files) <= MOST_FILES
    assert sum(variables for variables, _ in counts) <= MOST_VAGUE
    assert sum(definitions for _, definitions in counts) <= MOST_VAGUE_DEFINITIONS


# The modules of this house that a command loads: what there is today. These numbers only become smaller.
LOADED = {
    "--help": 34,
    "config": 37,
    "compat torch==2.3.0 --gpu H100": 60,
    "list": 71,
}
FINDERS = 119
"""Those that `build` loads to find that an image is built and tested."""


def loaded(program: str, store: Path, *arguments: str) -> set[str]:
    """The modules that a program has loaded at its end."""
    code = f"import atexit, sys; atexit.register(lambda: print(*sys.modules, file=sys.stderr)); {program}"
    environ = {**os.environ, "IMAGEFACTORY_STORE": str(store), "IMAGEFACTORY_CACHE": str(store)}
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return set(done.stderr.splitlines()[-1].split())


def of_house(modules: set[str]) -> set[str]:
    return {name for name in modules if name.partition(".")[0] == HOUSE.name}


def test_quick_commands_load_nothing_that_works(tmp_path: Path) -> None:
    """A command that finds is as fast as the files that it loads: so nobody adds a slow one by accident."""
    counts = {}
    for command in LOADED:
        modules = loaded("from imagefactory.cli import main; main()", tmp_path, *command.split())
        assert modules & (WORKERS | SLOW | EXTRAS) == set(), command
        counts[command] = len(of_house(modules))
    assert {name: count for name, count in counts.items() if count > LOADED[name]} == {}


def test_what_finds_a_built_image_loads_nothing_that_builds(tmp_path: Path) -> None:
    rows = [f"{ENGINES['assemble'].module}", f"{RUNNERS['unshare'].module}"]
    program = f"import imagefactory.actions.transfer, imagefactory.views.images, {', '.join(rows)}"
    modules = loaded(program, tmp_path)
    assert modules & (WORKERS | SLOW | EXTRAS) == set()
    assert len(of_house(modules)) <= FINDERS
