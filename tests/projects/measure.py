"""Public GPU projects, brought by their own files: `tests/run projects [OPTION ...] [NAME ...]`.

`projects.toml` has each project's repository, commit and file as facts, and the result of each step. The
files are read from GitHub, or from FACTORY_TEST_PROJECTS: another address, or a directory. Below it is
OWNER/REPO/COMMIT/PATH. A project whose files cannot be read is replaced by a small one of the same form,
`shapes/NAME/`, and the output says so. An empty FACTORY_TEST_PROJECTS means stand-ins only.

Steps: `recipe import FILE`, with at most two hints obeyed; `lock`; then the lock is searched for what the
file requires, by a reader of its own (requested.py). `--build` takes all of the project's code, builds what
has no wheel and then the image, and imports in the image what the code imports (imported.py).
Exit code 1 if a result differs from projects.toml.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

import yaml  # noqa: E402
from packaging.utils import canonicalize_name  # noqa: E402

from tests.projects import requested  # noqa: E402

HERE = Path(__file__).parent
FACTS = HERE / "projects.toml"
SHAPES = HERE / "shapes"
PAGE = ROOT / "docs/projects.md"
BEGIN, END = "<!-- table: written by `tests/run projects --write` -->", "<!-- end of the table -->"
HINTS = 2
LARGEST = 8 << 20  # bytes of one file
LARGEST_TREE = 512 << 20  # bytes of a project's archive
LONGEST_REASON = 160  # characters, in the table
HOST = "https://raw.githubusercontent.com"
ARCHIVES = "https://codeload.github.com"
PROBE = HERE / "imported.py"
_OPTION = re.compile(
    r"--(framework|cuda|extends|source|context|extra|group|environment)[ "
    r"=]([A-Za-z0-9][^\s,;)`']*)|--(partial)\b"
)
_PLACEHOLDER = re.compile(r"(^|=)[A-Z]{2,}$")

NEW_WORDS = IMPORTS, PARTLY, STOPS, NONE = "imports", "in part", "stops", "-"
LOCK_WORDS = LOCKS, BUILD, CONDA, CANNOT, NONE = "locks", "needs a build", "needs conda", "cannot", "-"
IMAGE_WORDS = IMPORTS, FAILS, NONE = "imports", "fails", "-"


@dataclass(frozen=True)
class Project:
    """A row of projects.toml. `answers` are the options that a person gives when a hint asks for them."""

    name: str
    area: str
    repository: str
    commit: str
    file: str
    beside: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    answers: tuple[str, ...] = ()
    new: str = IMPORTS
    lock: str = LOCKS
    why: str = ""
    image: str = NONE


@dataclass
class Result:
    """What the steps came to. `changed` are requirements that the lock lacks and no message names."""

    name: str
    real: bool
    new: str = NONE
    lock: str = NONE
    image: str = NONE
    hints: list[str] = field(default_factory=list)
    losses: int = 0
    chosen: str = ""
    error: str = ""
    changed: list[str] = field(default_factory=list)
    reported: list[str] = field(default_factory=list)
    seconds: float = 0.0
    output: str = ""


def load(path: Path | None = None) -> list[Project]:
    """Return the rows of projects.toml. Raises TypeError for a key that is not one of Project."""
    rows: list[dict[str, Any]] = tomllib.loads((path or FACTS).read_text())["project"]
    found = []
    for row in rows:
        values: dict[str, Any] = {key: tuple(v) if isinstance(v, list) else v for key, v in row.items()}
        found.append(Project(**values))
    return found


def bring(project: Project, origin: str, folder: Path) -> bool:
    """Put the project's files into `folder`; return whether they are real, not the small ones instead."""
    names = (project.file, *project.beside)
    try:
        if not origin:
            raise FileNotFoundError("stand-ins only")
        for name in names:
            target = folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(_fetch(f"{origin}/{project.repository}/{project.commit}/{name}"))
        real = True
    except OSError:
        real = False
    if not real:
        shutil.rmtree(folder)
        shutil.copytree(SHAPES / project.name, folder)
    # The root of the git work tree is where a build context begins.
    subprocess.run(["git", "init", "--quiet", folder], check=False, capture_output=True)
    return real


def bring_all(project: Project, origin: str, folder: Path) -> bool:
    """Put the project's whole tree into `folder`; return whether it could be read."""
    try:
        if not re.match(r"https?://", origin):
            shutil.copytree(Path(origin, project.repository, project.commit), folder, dirs_exist_ok=True)
            return True
        host = ARCHIVES if origin == HOST else origin
        data = _fetch(f"{host}/{project.repository}/tar.gz/{project.commit}", LARGEST_TREE)
        unpack = ["tar", "--extract", "--gzip", "--strip-components=1", "--directory", folder]
        folder.mkdir(parents=True, exist_ok=True)
        subprocess.run(unpack, check=True, capture_output=True, input=data)  # tar refuses paths out of it
    except (OSError, subprocess.CalledProcessError):
        return False
    return True


def _fetch(address: str, largest: int = LARGEST) -> bytes:
    if not re.match(r"https?://", address):
        return Path(address).read_bytes()
    with urllib.request.urlopen(address, timeout=60) as answer:  # OSError where it cannot be reached
        data: bytes = answer.read(largest + 1)
    if len(data) > largest:
        raise OSError(f"{address} is larger than {largest} bytes")
    return data


@dataclass
class Call:
    """One run of the program. `said` is what it prints for a person, `document` its JSON."""

    code: int
    document: dict[str, Any]
    said: str
    output: str = ""

    @property
    def errors(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.document.get("errors", [])
        return found

    @property
    def first_error(self) -> str:
        """The first line of the first error; of packages without wheels their names."""
        for error in self.errors:
            if packages := error.get("packages"):
                return f"no wheel of {', '.join(one['name'] or one['source'] for one in packages)}"
            return str(error.get("message", "")).partition("\n")[0][:300]
        return ""

    @property
    def advice(self) -> str:
        return "\n".join(str(error.get("hint", "")) for error in self.errors)


def call(program: Path, folder: Path, *words: str, seconds: int) -> Call:
    try:
        done = subprocess.run(
            [program, "-C", folder, *words, "--json"],
            capture_output=True,
            text=True,
            timeout=seconds,
            cwd=folder,
            stdin=subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired:
        return Call(124, {"errors": [{"message": f"{words[0]} took more than {seconds} s"}]}, "")
    try:
        document = json.loads(done.stdout)
    except ValueError:
        document = {"errors": [{"message": (done.stderr or done.stdout)[-300:]}]} if done.returncode else {}
    return Call(done.returncode, document, done.stderr, done.stderr + done.stdout)


def advised(advice: str, answers: Sequence[str]) -> list[tuple[str, str]]:
    """The options of a hint that the row lists, with the hint's own value where it has one."""
    given = dict(pairs(answers))
    obeyed: dict[str, str] = {}
    for found in _OPTION.finditer(advice):
        option, value = f"--{found[1] or found[3]}", (found[2] or "").rstrip(".")
        if _PLACEHOLDER.search(value):
            value = given.get(option, "")
            if not value:
                continue
        if option in given or "*" in given:
            obeyed.setdefault(option, value)
    return list(obeyed.items())


def pairs(options: Sequence[str]) -> list[tuple[str, str]]:
    """Options and their values, of a list as a shell has it."""
    found: list[tuple[str, str]] = []
    for word in options:
        if word.startswith("--") or word == "*":
            found.append((word, ""))
        else:
            found[-1] = (found[-1][0], word)
    return found


def flat(options: Sequence[tuple[str, str]]) -> list[str]:
    return [word for option, value in options for word in (option, value) if word]


def measure(
    project: Project,
    program: Path,
    origin: str,
    work: Path,
    *,
    solve: bool = True,
    images: list[str] | None = None,
) -> Result:
    """Take the steps; those of an image too where `images` is a list, and the project can be read whole."""
    start = time.monotonic()
    folder = work / project.name
    folder.mkdir(parents=True)
    result = Result(project.name, bring(project, origin, folder))
    whole = images is not None and result.real and bring_all(project, origin, folder)
    call(program, folder, "init", ".", seconds=60)
    _steps(project, program, folder, result, solve=solve)
    if images is not None and whole and result.lock in (LOCKS, BUILD) and not result.changed:
        try_image(program, folder, result, images)
    result.seconds = round(time.monotonic() - start, 1)
    return result


def try_image(program: Path, folder: Path, result: Result, images: list[str]) -> None:
    """Build what has no wheel, then the image, and import in it what the project's code imports.

    `images` has the names of earlier images of this run, and of this one afterwards.
    """
    steps: list[tuple[str, ...]] = [("build", result.name)]
    if result.lock == BUILD:
        steps.insert(0, ("lock", "--build"))
    recipe = folder / f"recipes/{result.name}.yaml"
    obeyed = 0
    while steps:
        words = steps.pop(0)
        done = call(program, folder, *words, seconds=3600)
        result.output += done.output
        if not done.code:
            continue
        if words[0] == "build" and obeyed < HINTS and obey(done.advice, recipe):
            obeyed += 1
            result.hints.append(done.advice.partition(" to the recipe")[0])
            steps = [("lock",), words]
            continue
        said = " ".join(words) if words[0] == "lock" else words[0]
        result.image = f"{FAILS}: `{said}`: {smoke_failure(done) or done.first_error}"
        return
    (built,) = done.document["results"]
    mounts = ("--mount", f"{PROBE.parent}:/probe", "--mount", f"{folder}:/project")
    inside = ("python", f"/probe/{PROBE.name}", "/project")
    command = [program, "-C", folder, "run", "-q", *mounts, built["target"], "--", *inside]
    within = subprocess.run(command, check=False, capture_output=True, text=True, timeout=1800)
    result.output += within.stderr + within.stdout
    result.image = imported(within.stdout, within.stderr)
    # The next image shares the framework's layers with this one: only the image before it goes.
    if images:
        call(program, folder, "image", "remove", *images, seconds=60)
        call(program, folder, "image", "prune", seconds=600)
    images[:] = [built["image"]["name"]]


def obey(advice: str, recipe: Path) -> bool:
    """Write what a smoke test's hint says to add into the recipe; return whether it says any."""
    lists = re.findall(r"\b(system|packages|pip|constraints): \[([^\]]+)\]", advice)
    document = yaml.safe_load(recipe.read_text())
    for key, values in lists:
        document[key] = [*document.get(key, ()), *values.split(", ")]
    recipe.write_text(yaml.safe_dump(document, sort_keys=False))
    return bool(lists)


def smoke_failure(built: Call) -> str:
    """What the first failed check of an image says."""
    for one in built.document.get("results", ()):
        for check in (one["smoke"] or {}).get("checks", ()):
            if check["state"] == "failed":
                return str(check["detail"])
    return ""


def imported(output: str, progress: str) -> str:
    """What the probe found, in a line."""
    try:
        found = json.loads(output)
    except ValueError:
        last = (progress.strip().splitlines() or ["nothing"])[-1]
        return f"{FAILS}: {last} ended the process"
    absent = f"; the file does not require {', '.join(found['absent'])}" if found["absent"] else ""
    if found["fails"]:
        return f"{FAILS}: {'; '.join(found['fails'].values())}{absent}"
    return f"{IMPORTS}{absent}"


def _steps(project: Project, program: Path, folder: Path, result: Result, *, solve: bool) -> None:
    options = pairs(project.options)
    said = ""
    for tried in range(HINTS + 1):
        done = call(
            program,
            folder,
            *("recipe", "import", project.file, "--family", project.name),
            *flat(options),
            seconds=600,
        )
        said += done.said
        result.output += done.output
        if done.code == 0:
            break
        result.error = done.first_error
        more = [
            (key, value)
            for key, value in advised(done.advice, project.answers)
            if (key, value) not in options
        ]
        result.losses = losses_of(done)
        if tried == HINTS or not more:
            result.new = STOPS
            return
        options = [pair for pair in options if pair[0] not in dict(more)] + more
        result.hints.append(" ".join(flat(more)))
    result.error, result.losses = "", losses_of(done)
    result.new = PARTLY if ("--partial", "") in options else IMPORTS
    recipe = done.document.get("recipe", "")
    result.chosen = chosen(recipe)
    if not solve:
        return
    done = call(program, folder, "lock", seconds=900)
    result.output += done.output
    if done.code:
        result.error = done.first_error
        result.lock = word_of(done)
        return
    result.lock = LOCKS
    compare(project, folder, result, (said + done.said).lower(), options)


def losses_of(done: Call) -> int:
    """How many requests of the file the program says it cannot keep."""
    return len(done.document.get("lost", ()))


def chosen(recipe: str) -> str:
    """The framework, its version, CUDA and Python of a recipe, in few words."""
    patterns = (
        r"^framework: (\S+)",
        r"^ +- version: \"?([^\"\n]+)",
        r"^ +cuda: \[\"?([^\"\]]+)",
        r"^python: \"?([0-9.]+)",
    )
    found = [re.search(pattern, recipe, re.MULTILINE) for pattern in patterns]
    words = [one[1] if one else "?" for one in found]
    source = re.search(r"^source: (\S+)", recipe, re.MULTILINE)
    return f"{words[0]} {words[1]} cuda {words[2]} python {words[3]}" + (f" ({source[1]})" if source else "")


def word_of(done: Call) -> str:
    """Why a lock failed: it needs conda's channels, a build of packages without wheels, or anything else."""
    if re.search(r"the channel \S+ cannot be read", done.said):
        return CONDA
    if any("--build" in str(error.get("hint", "")) for error in done.errors):
        return BUILD
    return CANNOT


def compare(
    project: Project, folder: Path, result: Result, said: str, options: Sequence[tuple[str, str]]
) -> None:
    """Search the lock for each requirement of the file.

    A missing one that a message names is reported. One outside of its bounds is changed, whatever is said.
    """
    locks = sorted((folder / "lockfiles").glob("*.requirements.txt"))
    if not locks:
        return
    python, versions = requested.lock_versions(locks[0].read_text())
    extras = [value for option, value in options if option == "--extra"]
    groups = [value for option, value in options if option == "--group"]
    asked = requested.read(folder / project.file, folder, extras, groups)
    for name, what in requested.unmet(asked.requirements, versions, python):
        named = re.search(rf"(?<![\w-]){re.escape(name.lower())}(?![\w-])", said)
        reported = named and canonicalize_name(name) not in versions
        (result.reported if reported else result.changed).append(what)
    if len(majors := requested.cuda_majors(versions)) > 1:
        result.changed.append(f"CUDA {' and '.join(sorted(majors))} in one lock")
    recipe = (folder / f"recipes/{project.name}.yaml").read_text()
    for one in asked.unread:
        path = one.removeprefix("-e ").partition("[")[0]
        if path == "." and re.search(r"^ +- [\"']?\.[\"']?$|^files:", recipe, re.MULTILINE):
            continue
        name = re.sub(r"\.git\b.*|[@#].*", "", path).rstrip("/").split("/")[-1].lower()
        if (
            name not in versions
            and name.replace("_", "-") not in versions
            and (path == "." or path.lower() not in said)
        ):
            result.changed.append(f"{one}: not in the lock")


# --- the table ---------------------------------------------------------------------------------


def differences(project: Project, result: Result) -> list[str]:
    found = []
    for step in ("new", "lock"):
        expected, seen = getattr(project, step), getattr(result, step)
        if expected != seen and not (expected == CONDA and seen == LOCKS):
            found.append(f"{step}: {seen}, expected {expected}")
    if result.image not in (NONE, project.image) and cell(result.image) != project.image:
        found.append(f"image: {result.image}, expected {project.image}")
    if result.changed:
        found.append(f"changed silently: {'; '.join(result.changed)}")
    return found


def row_of(project: Project) -> str:
    address = f"https://github.com/{project.repository}/blob/{project.commit}/{project.file}"
    link = f"[{project.repository}]({address})"
    steps = (project.new, project.lock, project.image, project.why)
    cells = (project.name, project.area, link, f"`{project.file}`", *steps)
    return f"| {' | '.join(cells)} |"


def table(projects: Sequence[Project]) -> str:
    head = [
        "| project | area | repository | file | `recipe import` | `lock` | `build`, import | why |",
        "|---|---|---|---|---|---|---|---|",
    ]
    return "\n".join([BEGIN, *head, *map(row_of, projects), END])


def write(results: Sequence[Result]) -> None:
    """Take the results over into projects.toml, and write its rows into the page."""
    text = FACTS.read_text()
    for result in results:
        why, made = (cell(text) for text in (reason(result), result.image))
        words = f'new = "{result.new}"\nlock = "{result.lock}"\n' + (f'why = "{why}"\n' if why else "")
        head = rf'(name = "{re.escape(result.name)}"\n(?:(?!\[\[).*\n)*?)'
        row = head + r"new = .*\nlock = .*\n(?:why = .*\n)?(image = .*\n)?"
        found = re.search(row, text)
        assert found is not None, result.name
        image = found[2] or "" if result.image == NONE else f'image = "{made}"\n'
        text = text[: found.start()] + found[1] + words + image + text[found.end() :]
    FACTS.write_text(text)
    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(before + table(load()) + rest.partition(END)[2])


def cell(text: str) -> str:
    """Text as a cell of the table and a string of the facts."""
    return re.sub(r"\s+", " ", re.sub(r"[|\\\"]", "'", text))[:LONGEST_REASON]


def reason(result: Result) -> str:
    """The error's first sentence, without the target's name, or what the lock lacks of the file."""
    if result.changed:
        return "changed silently: " + "; ".join(result.changed)
    first = re.sub(rf"^{re.escape(result.name)}-\S+: ", "", result.error)
    return re.sub(r"\s+", " ", first).rstrip(":")


def line_of(result: Result) -> str:
    parts = [
        f"{result.name:24}",
        "real    " if result.real else "stand-in",
        f"{result.new:8}",
        f"{result.lock:13}",
        f"{result.image:9}",
    ]
    parts.append(f"{result.seconds:6.1f} s  losses {result.losses}  {result.chosen}")
    if result.hints:
        parts.append(f"[obeyed: {' / '.join(result.hints)}]")
    if result.changed:
        parts.append(f"CHANGED: {'; '.join(result.changed)}")
    return " ".join(parts) + (f"\n{'':25}{result.error}" if result.error else "")


def main(words: Sequence[str], environ: Mapping[str, str]) -> int:
    parser = argparse.ArgumentParser(prog="tests/run projects", description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="projects of the facts file [default: all]")
    parser.add_argument("--facts", type=Path, default=FACTS)
    parser.add_argument("--program", type=Path, default=ROOT / ".venv/bin/imagefactory")
    parser.add_argument("--output", type=Path, help="write results.json and each project's output there")
    parser.add_argument("--jobs", "-n", type=int, default=2, help="projects at once; 1 with --build")
    parser.add_argument("--no-lock", action="store_true", help="stop after `recipe import`")
    parser.add_argument("--build", action="store_true", help="build the images too, and import in them")
    parser.add_argument(
        "--write", action="store_true", help="write results into projects.toml and docs/projects.md"
    )
    given = parser.parse_args(words)
    projects = load(given.facts)
    if unknown := set(given.names) - {one.name for one in projects}:
        parser.error(f"not in {given.facts.name}: {', '.join(sorted(unknown))}")
    chosen_ones = [one for one in projects if not given.names or one.name in given.names]
    origin = environ.get("FACTORY_TEST_PROJECTS", HOST).rstrip("/")
    failed, results, images = 0, [], [] if given.build else None
    jobs = 1 if given.build else given.jobs
    with tempfile.TemporaryDirectory(prefix="projects-") as work, ThreadPoolExecutor(jobs) as pool:
        os.environ.setdefault("IMAGEFACTORY_STORE", f"{work}/store")

        def one_project(project: Project) -> Result:
            solve = not given.no_lock
            return measure(project, given.program, origin, Path(work), solve=solve, images=images)

        rows = {pool.submit(one_project, project): project for project in chosen_ones}
        for done in as_completed(rows):
            project, result = rows[done], done.result()
            print(line_of(result), flush=True)
            results.append(result)
            if not given.no_lock and (others := differences(project, result)):
                failed += 1
                print(f"{'':25}DIFFERENT: {'; '.join(others)}", flush=True)
            if given.output:
                given.output.mkdir(parents=True, exist_ok=True)
                (given.output / f"{result.name}.txt").write_text(result.output)
                found = [asdict(one) | {"output": ""} for one in results]
                (given.output / "results.json").write_text(json.dumps(found, indent=1))
    real = sum(one.real for one in results)
    print(f"== {real} real projects, {len(results) - real} stand-ins of the same form; {failed} differ")
    if given.write:
        write(results)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], os.environ))
