"""Parse the resources that a batch script requests: GPUs, node features, memory, time. Pure.

Source: Slurm's manual, sbatch(1): --gres, --gpus, --constraint, --mem, --time, --array.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta

from imagefactory.errors import UsageError
from imagefactory.extras.lint.batch_reader import BatchOption, BatchScript
from imagefactory.extras.lint.findings import FileLocation
from imagefactory.extras.lint.image import JobImage, addressed, has_host, referred
from imagefactory.extras.lint.reach import JobReachability, ReachableGpu
from imagefactory.gpu.knowledge.gpus import find_gpu
from imagefactory.jobs.slurm import GPU_CHECK
from imagefactory.model import SourceLocation
from imagefactory.recipes.shell_words import RunWord, Shell, ShellCommand
from imagefactory.schedulers.pool import ImageKind, Inventory, PoolGpu, PoolMachine
from imagefactory.schedulers.sizes import MB, parse_size
from imagefactory.schedulers.slurm.nodes import FEATURES
from imagefactory.settings.own_commands import parse_time
from imagefactory.versions import nearest

GPU_OPTIONS = ("gres", "gpus", "gpus-per-node", "gpus-per-task", "gpus-per-socket", "tres-per-task")
MEMORY_OPTIONS = ("mem", "mem-per-cpu", "mem-per-gpu")
_GPU = re.compile(r"(?:gres[/:])?(?P<name>gpu|shard|mps)(?:[:=](?P<rest>.*))?")
_COUNT = re.compile(r"[0-9]+[kKmM]?")
_FEATURE = re.compile(r"[A-Za-z0-9_.+:=/-]+")
_CAPABILITY = re.compile(r"(?:gpu_?)?(?:cc|sm|compute)[:_-]?([0-9]{1,2})\.?([0-9])", re.IGNORECASE)
_ARRAY = re.compile(r"([0-9]+)(?:-([0-9]+)(?::([0-9]+))?)?")
_UNLIMITED = ("infinite", "unlimited", "-1")
_MOST_TERMS = 100

Names = Callable[[Collection[str]], bool]
"""A test of the features of a node."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRequest:
    """The resources that one job requests. `at` is the option that requests GPUs, or None.

    `gpus` is the number per node. `kinds` are type names, empty for any type. `features` tests the features
    of a node, None if the job requires none. `alternatives` are feature names joined only by `|`. `memory` is
    in bytes per node, 0 if unknown. `jobs` is the array size, None if it cannot be read. `faults` are
    (location, problem, hint).
    """

    at: BatchOption | None
    gpus: int
    kinds: tuple[str, ...]
    part: bool
    features: Names | None
    alternatives: tuple[str, ...]
    memory: int
    cpus: int
    time: timedelta | None
    jobs: int | None
    faults: tuple[tuple[FileLocation, str, str], ...]


def read_batch_request(script: BatchScript) -> BatchRequest:
    """Return the request in the options. An unreadable option becomes a fault and is otherwise ignored."""
    reader = _BatchRequestReader(script)
    gpus = list(reader.gpus())
    memory, cpus = reader.memory(sum(count for _, count, _ in gpus)), reader.number("cpus-per-task")
    features, alternatives = reader.features()
    asking = [script.options[name] for name in GPU_OPTIONS if name in script.options]
    gpu_option = next(
        (candidate for candidate in asking if any(option is candidate for _, _, option in gpus)), None
    )
    return BatchRequest(
        at=gpu_option,
        gpus=max(1, sum(count for _, count, option in gpus if option is gpu_option)) if gpu_option else 0,
        kinds=tuple(dict.fromkeys(kind for kind, _, _ in gpus if kind)),
        part=any(option.value.startswith(("shard", "mps")) for _, _, option in gpus),
        features=features,
        alternatives=alternatives,
        memory=memory,
        cpus=cpus,
        time=reader.time(),
        jobs=reader.jobs(),
        faults=tuple(reader.faults),
    )


def capability_of(name: str) -> str:
    """Return the compute capability that a type or feature name implies, or an empty string.

    Examples: `a100`, `GPU_SKU:A100_SXM4`, `sm80`.
    """
    if match := _CAPABILITY.fullmatch(name):
        return f"{match[1]}.{match[2]}"
    short = name.rpartition(":")[2].replace("_", " ")
    if not any(letter.isdigit() for letter in short):
        return ""
    try:
        return str(find_gpu(short).capability)
    except UsageError:
        return ""


class _BatchRequestReader:
    """A reader of the options in one script, which collects all faults."""

    def __init__(self, script: BatchScript) -> None:
        self.script = script
        self.faults: list[tuple[FileLocation, str, str]] = []

    def fault(self, option: BatchOption, message: str, hint: str) -> None:
        self.faults.append((option.at, f"{option.written}={option.value[:40]}: {message}", hint))

    def gpus(self) -> Iterator[tuple[str, int, BatchOption]]:
        """Yield GPU types, their count per node, and the option that requests them."""
        for name in GPU_OPTIONS:
            option = self.script.options.get(name)
            if option is None or "$" in option.value:
                continue
            for part in option.value.split(","):
                text = part.strip()
                if name not in ("gres", "tres-per-task"):
                    text = f"gpu:{text}"
                match = _GPU.fullmatch(text)
                if match is None:
                    if re.match(r"(?:gres[/:])?gpus?\b|.*\bgpu\b", text):
                        self.fault(option, "that requests no GPU", "write --gres=gpu:TYPE:1")
                    continue
                words = [word for word in re.split(r"[:=]", match["rest"] or "") if word]
                count = words.pop() if words and _COUNT.fullmatch(words[-1]) else "1"
                if len(words) > 1:
                    self.fault(option, "it accepts only a type and a count", "write --gres=gpu:TYPE:1")
                    continue
                number = int(count.rstrip("kKmM"))
                if name == "gpus":
                    number = -(-number // max(1, self.nodes()))
                elif name in ("gpus-per-task", "tres-per-task"):
                    number *= self.tasks()
                if number:
                    yield (words[0] if words else ""), (1 if match["name"] != "gpu" else number), option

    def nodes(self) -> int:
        text = self.script.value("nodes").partition("-")[0]
        return int(text) if text.isascii() and text.isdigit() and len(text) < 6 else 1

    def tasks(self) -> int:
        """Return the tasks per node."""
        if "ntasks-per-node" in self.script.options:
            return self.number("ntasks-per-node")
        return -(-self.number("ntasks") // max(1, self.nodes()))

    def number(self, name: str) -> int:
        text = self.script.value(name)
        return int(text) if text.isascii() and text.isdigit() and len(text) < 6 else 1

    def memory(self, gpus: int) -> int:
        for name in MEMORY_OPTIONS:
            option = self.script.options.get(name)
            if option is None or "$" in option.value:
                continue
            text = option.value.strip()
            if text == "0":
                continue
            try:
                size = parse_size(text)
            except UsageError:
                self.fault(option, "that is not a size", "write a number and its unit: --mem=16G")
                continue
            times = {"mem": 1, "mem-per-cpu": self.number("cpus-per-task"), "mem-per-gpu": max(1, gpus)}
            return size * times[name]
        return 0

    def time(self) -> timedelta | None:
        option = self.script.options.get("time")
        if option is None or "$" in option.value or option.value.lower() in _UNLIMITED:
            return None
        time = parse_time(option.value)
        if time is None:
            self.fault(
                option, "that is not a time", "write hours:minutes:seconds or days-hours: 12:00:00, 2-00"
            )
        return time

    def jobs(self) -> int | None:
        option = self.script.options.get("array")
        if option is None:
            return 1
        count = 0
        for part in option.value.partition("%")[0].split(","):
            match = _ARRAY.fullmatch(part.strip())
            if match is None or any(len(group or "") > 7 for group in match.groups()):
                return None
            first, last, step = int(match[1]), int(match[2] or match[1]), int(match[3] or 1) or 1
            count += len(range(first, last + 1, step))
        return count

    def features(self) -> tuple[Names | None, tuple[str, ...]]:
        option = self.script.options.get("constraint")
        if option is None or "$" in option.value:
            return None, ()
        try:
            return parse_features(option.value)
        except ValueError:
            message = "imagefactory cannot read that, so it is not checked"
            self.fault(option, message, "features are joined by & and |, and by brackets: (a100|h100)&new")
            return None, ()


def parse_features(text: str) -> tuple[Names, tuple[str, ...]]:
    """Return a test of node features such as `(a100|h100)&new`, and the names if only `|` joins them.

    Raises ValueError for an invalid expression. Counts (`a100*2`) and `[...]` (the same for all nodes) do not
    change the test of a single node.
    """
    tokens = re.findall(r"[A-Za-z0-9_.+:=/-]+(?:\*[0-9]+)?|\S", text.replace("[", "(").replace("]", ")"))
    if not tokens or len(tokens) > _MOST_TERMS:
        raise ValueError(text)
    judge, rest = _any_of(tokens)
    if rest:
        raise ValueError(text)
    names = [token.partition("*")[0] for token in tokens if _FEATURE.match(token)]
    return judge, () if "&" in tokens or "," in tokens else tuple(names)


def _any_of(tokens: list[str]) -> tuple[Names, list[str]]:
    first, rest = _all_of(tokens)
    judges = [first]
    while rest[:1] == ["|"]:
        another, rest = _all_of(rest[1:])
        judges.append(another)
    return (lambda names: any(judge(names) for judge in judges)), rest


def _all_of(tokens: list[str]) -> tuple[Names, list[str]]:
    first, rest = _single_option(tokens)
    judges = [first]
    while rest[:1] in (["&"], [","]):
        another, rest = _single_option(rest[1:])
        judges.append(another)
    return (lambda names: all(judge(names) for judge in judges)), rest


def _single_option(tokens: list[str]) -> tuple[Names, list[str]]:
    if not tokens:
        raise ValueError("a feature is missing")
    if tokens[0] == "(":
        judge, rest = _any_of(tokens[1:])
        if rest[:1] != [")"]:
            raise ValueError("a bracket is missing")
        return judge, rest[1:]
    name = tokens[0].partition("*")[0]
    if not _FEATURE.fullmatch(name):
        raise ValueError(name)
    return (lambda names: name in names), tokens[1:]


def memory_in_mb(option: BatchOption) -> int:
    """Return the MB of an amount without a unit, and 0 for one with a unit."""
    return int(option.value) if option.value.isascii() and option.value.isdigit() else 0


# --- Image starts in a batch script: apptainer, docker, podman, or a Slurm plugin: pyxis, or the Container
# Engine of CSCS, which reads an EDF. Pure
# Source: apptainer exec(1), docker run(1), podman-run(1), NVIDIA's pyxis 0.24, "Usage"; docs.cscs.ch, "EDF
# reference" (2026-08); sarus-suite/raster, src/schema/edf.json.


APPTAINER, DOCKER, PYXIS = ("apptainer", "singularity"), ("docker", "podman"), "container-image"
EDF_OPTIONS = ("environment", "edf")
_PYXIS_VARIABLE = "PYXIS_CONTAINER_IMAGE"
_EDF_KEYS = (
    "annotations", "base_environment", "devices", "entrypoint", "env", "image", "mounts", "workdir",
    "writable",
)  # fmt: skip
_EDF_MOUNT = re.compile(r"[^:]+:[^:]+(?::[^:]+)?")
_SUBMIT_DIRECTORY = re.compile(r"\$(?:\{(?:SLURM_SUBMIT_DIR|PWD)\}|(?:SLURM_SUBMIT_DIR|PWD)(?=/))")
ReadEdf = Callable[[str], str | None]
_PRINTING_COMMANDS = (
    "echo",
    "printf",
    "which",
    "type",
    "module",
    "ml",
    "alias",
    "man",
    "hash",
    "test",
    "[",
    "[[",
)
_RUNS = ("exec", "run", "shell")
_VALUED = {
    "-B", "--bind", "--env", "--env-file", "-H", "--home", "--pwd", "--cwd", "-W", "--workdir", "-S",
    "--scratch", "-o", "--overlay", "--app", "--network", "--network-args", "--dns", "--hostname",
    "--security",
    "--add-caps", "--drop-caps", "--apply-cgroups", "--mount", "--memory", "--memory-swap",
    "--memory-reservation", "--cpus", "--cpu-shares", "--cpuset-cpus", "--cpuset-mems", "--pids-limit",
    "--blkio-weight", "--fusemount", "--no-mount", "--pem-path", "--docker-host", "--authfile", "--device",
    "--cdi-dirs", "--config", "--underlay-dir", "--netns-path", "--tmp-sandbox-dir",
}  # fmt: skip
_DOCKER_VALUED = {
    "-v", "--volume", "-e", "--env", "--env-file", "--gpus", "-w", "--workdir", "--name", "--shm-size",
    "--ulimit", "-u", "--user", "--network", "--net", "--ipc", "--mount", "--device", "--entrypoint", "-p",
    "--publish", "-m", "--memory", "--memory-swap", "--cpus", "--cpuset-cpus", "-c", "--cpu-shares",
    "-h", "--hostname", "--pid", "--runtime", "--security-opt", "--cap-add", "--cap-drop", "--group-add",
    "-l", "--label", "--log-driver", "--log-opt", "--pull", "--platform", "--tmpfs", "--userns", "--uidmap",
    "--gidmap", "--add-host", "--cidfile", "--restart", "--stop-timeout", "--cgroup-parent", "--volumes-from",
    "--annotation", "--arch", "--authfile", "--hooks-dir", "--pids-limit", "--root", "-H", "--context",
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageStart:
    """A line that starts an image. `options` are the words before the image.

    `image` is the word for the image, or None. `named` is the image itself, None if it is known only at run
    time. `faults` are the problems of its EDF and their fixes, `lost` the name of an EDF that cannot be read.
    """

    program: str
    verb: str
    at: FileLocation
    image: RunWord | None
    named: JobImage | None
    options: tuple[str, ...]
    command: ShellCommand | None
    faults: tuple[tuple[str, str], ...] = ()
    lost: str = ""

    def has(self, *names: str) -> bool:
        return any(option.partition("=")[0] in names for option in self.options)


def find_starts(script: BatchScript, read_edf: ReadEdf) -> tuple[ImageStart, ...]:
    """Return all image starts in order. A start in an #SBATCH line comes first."""
    starts = []
    if option := script.option(PYXIS, *EDF_OPTIONS):
        location = SourceLocation(file="", line=option.at.line, column=option.at.column)
        word = RunWord(option.value, location, known="$" not in option.value)
        start = _by_pyxis(word, "sbatch", None) if option.name == PYXIS else _by_edf(word, None, read_edf)
        starts.append(start)
    return (*starts, *(_in_shell(script.shell, read_edf) if script.shell else ()))


def _in_shell(shell: Shell, read_edf: ReadEdf) -> Iterator[ImageStart]:
    for command in shell.commands:
        words = command.words
        if words[0].text in _PRINTING_COMMANDS:
            continue
        programs = [word.text.rpartition("/")[2] for word in words]
        index = next((at for at, name in enumerate(programs) if name in (*APPTAINER, *DOCKER)), None)
        own_words = words if index is None else words[:index]
        step = programs[0] == "srun"
        pyxis = _step_option(own_words, (PYXIS,)) if step else None
        edf = _step_option(own_words, EDF_OPTIONS) if step else None
        if pyxis is not None:
            yield _by_pyxis(pyxis, "srun", command)
        elif edf is not None:
            yield _by_edf(edf, command, read_edf)
        elif index is not None:
            yield from _by_program(programs[index], words[index:], command)
        elif step and (word := command.sets.get(_PYXIS_VARIABLE) or shell.sets.get(_PYXIS_VARIABLE)):
            yield _by_pyxis(word, "srun", command)


def _by_program(program: str, words: Sequence[RunWord], command: ShellCommand) -> Iterator[ImageStart]:
    docker = program in DOCKER
    valued = _DOCKER_VALUED if docker else _VALUED
    verb, rest = _operand(words[1:], valued)
    if docker and verb and verb.text == "container":
        verb, rest = _operand(rest, valued)
    if verb is None or verb.text not in (("run",) if docker else _RUNS):
        return
    image, after = _operand(rest, valued)
    own_words = rest[: len(rest) - len(after) - 1] if image else rest
    before = words[1 : words.index(verb)]
    named = None
    if image is not None and image.known:
        named = (
            referred(program, image.text, ImageKind.DOCKER, "HasDocker")
            if docker
            else addressed(program, image.text)
        )
    yield ImageStart(
        program=program,
        verb=verb.text,
        at=FileLocation(words[0].where.line, words[0].where.column),
        image=image,
        named=named,
        options=tuple(word.text for word in (*before, *own_words)),
        command=command,
    )


_OPTIONS_ARRAY = re.compile(r"\$\{[A-Za-z_][A-Za-z0-9_]*\[[@*]\]\}")


def _operand(words: Sequence[RunWord], valued: set[str]) -> tuple[RunWord | None, Sequence[RunWord]]:
    """Return the first word that is not an option or its value, and the words after it.

    An array, as in `"${options[@]}"`, is taken for options.
    """
    index = 0
    while index < len(words):
        text = words[index].text
        if (not text.startswith("-") or text == "-") and not _OPTIONS_ARRAY.fullmatch(text):
            return words[index], words[index + 1 :]
        index += 2 if text in valued else 1
    return None, ()


def _step_option(words: Sequence[RunWord], names: Collection[str]) -> RunWord | None:
    """Return the value of the first of these options of srun."""
    for index, word in enumerate(words):
        name, equals, _ = word.text.partition("=")
        if name.startswith("--") and name[2:] in names:
            if equals:
                location = replace(word.where, column=word.where.column + len(name) + 1)
                return RunWord(word.text[len(name) + 1 :], location, word.known)
            return words[index + 1] if index + 1 < len(words) else None
    return None


def _by_edf(word: RunWord, command: ShellCommand | None, read_edf: ReadEdf) -> ImageStart:
    """Return a start through an EDF, whose images are written as for pyxis.

    Its problems have the place of its path in the script.
    """
    path = _SUBMIT_DIRECTORY.sub(".", word.text)
    text = read_edf(path) if "$" not in path else None
    if text is None:
        start = _by_pyxis(replace(word, known=False), "srun", command)
        return replace(start, lost=word.text)
    image, faults = _read_edf(text)
    start = _by_pyxis(RunWord(image, word.where, known=bool(image) and "$" not in image), "srun", command)
    return replace(start, faults=tuple((f"{path[:60]}: {fault}", hint) for fault, hint in faults))


def _read_edf(text: str) -> tuple[str, list[tuple[str, str]]]:
    """Return the image of an EDF, and its problems with their fixes."""
    try:
        edf = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        return "", [(f"it is not TOML: {' '.join(str(error).split())[:200]}", "write KEY = VALUE lines")]
    image, faults = edf.get("image", ""), []
    if not isinstance(image, str) or not (image or "base_environment" in edf):
        faults.append(
            ("it names no image, so the program runs without one", 'write image = "HOST#NAME@DIGEST"')
        )
    for key in edf:
        if key not in _EDF_KEYS:
            similar = nearest(key, _EDF_KEYS)
            faults.append(
                (f"'{key[:40]}' is not a key of EDF files", f"write {similar}" if similar else "remove it")
            )
    mounts = edf.get("mounts", [])
    for mount in mounts if isinstance(mounts, list) else [mounts]:
        if not (isinstance(mount, str) and _EDF_MOUNT.fullmatch(mount)):
            faults.append((f"'{str(mount)[:60]}' is not a mount", 'write "SOURCE:DESTINATION"'))
    for name, value in edf["env"].items() if isinstance(edf.get("env"), dict) else ():
        if not isinstance(value, str):
            faults.append(
                (f"the variable {name[:40]} is not text", f'write {name[:40]} = "{str(value)[:40]}"')
            )
    return image if isinstance(image, str) else "", faults


def _by_pyxis(word: RunWord, program: str, command: ShellCommand | None) -> ImageStart:
    """Return a start through pyxis.

    Its images are `[USER@][HOST#]NAME[:TAG]` or file paths; pyxis adds GPUs.
    """
    named = None
    if word.known and (_is_path(word.text) or word.text.startswith(_OF_ENROOT)):
        named = JobImage(key=PYXIS, address=word.text, kind=None, needs="")
    elif word.known:
        text = word.text.removeprefix("docker://")
        host, mark, name = text.partition("#")
        name = f"{host.rpartition('@')[2]}/{name}" if mark else text
        named = referred(
            PYXIS, name if mark or not has_host(name) else f"docker.io/{name}", ImageKind.DOCKER, ""
        )
    return ImageStart(
        program=program,
        verb=PYXIS,
        at=FileLocation(word.where.line, word.where.column),
        image=word,
        named=named,
        options=(),
        command=command,
    )


_OF_ENROOT = ("dockerd://", "podman://")
"""Prefixes of images in the Docker or Podman of a node, in enroot notation. pyxis accepts them since 0.14."""


def _is_path(text: str) -> bool:
    """Return whether pyxis reads the text as a file path: only if it starts with / or ./."""
    return text.startswith(("/", "./"))


def misread_by_pyxis(text: str) -> tuple[str, str] | None:
    """Return the problem and the fix for an image that pyxis misinterprets, else None."""
    plain = text.removeprefix("docker://")
    if _is_path(text):
        if text.endswith(".sif"):
            squash = f"{text.removesuffix('.sif')}.sqsh"
            return (
                f"pyxis cannot start '{text[:60]}', a .sif",
                f"write {squash[:80]}, as enroot import makes it",
            )
    elif text.startswith(_OF_ENROOT):
        return None
    elif "://" in plain:
        return f"pyxis does not accept '{plain[:60]}'", "write HOST#NAME:TAG, or ./FILE.sqsh"
    elif plain.lower().endswith((".sqsh", ".sqfs", ".squashfs", ".sif")) and "#" not in plain:
        path = plain.replace("~/", "$HOME/", 1) if plain.startswith("~/") else plain
        path = f"$PWD/{path}" if path.startswith("../") else path if path.startswith("$") else f"./{path}"
        return (
            f"pyxis looks for '{plain[:60]}' on Docker Hub: a file's path begins with / or ./",
            f"write {path[:80]}",
        )
    elif "#" not in plain and has_host(plain):
        return f"pyxis looks for '{plain[:60]}' on Docker Hub", f"write {as_pyxis(plain)[:200]}"
    return None


def as_pyxis(reference: str) -> str:
    """Return an image reference in pyxis notation (HOST#NAME)."""
    host, _, name = reference.partition("/")
    return f"{host}#{name}"


# --- The GPUs of a Slurm cluster that a job can get, and why it cannot get the others. Pure
# Each node of the inventory is compared by GPU type, features, name and size, and by the GPU check in the
# script. The total resources of a node count, not those that are free now.


_HOSTS = re.compile(r"(?P<start>[A-Za-z0-9_.-]*)\[(?P<numbers>[0-9,-]+)\](?P<end>[A-Za-z0-9_.-]*)")
_MOST_HOSTS = 10_000
_PROBE_LINE = re.compile(re.escape(GPU_CHECK % ("@@", "@@")).replace("@@", "(.*?)"), re.DOTALL)
_CASE = re.compile(r"^ *([0-9]+\.[0-9]+)\) needs=", re.MULTILINE)


def probe_answer(script: BatchScript) -> frozenset[str] | None:
    """Return the capabilities on which the script continues, None if it does not check its GPU.

    Scripts from `job write --site slurm` have such a check.
    """
    match = _PROBE_LINE.search(script.text)
    return frozenset(_CASE.findall(match[1])) if match else None


def find_batch_reach(script: BatchScript, request: BatchRequest, inventory: Inventory) -> JobReachability:
    """Return all GPUs of the inventory, each with the reason why the job cannot get it."""
    looked = probe_answer(script)
    only, not_on = (_names(script.value(name)) for name in ("nodelist", "exclude"))
    places = []
    for machine in inventory.machines:
        node = _of_node(machine, request, only, not_on)
        causes = [node if node[0] else _of_gpu(gpu, request, looked) for gpu in machine.gpus]
        fitting = sum(not reason for reason, _ in causes)
        few = f"its node has fewer than {request.gpus} such GPUs" if fitting < request.gpus else ""
        for gpu, (reason, unasked) in zip(machine.gpus, causes, strict=True):
            gpu = replace(gpu, mig=True) if request.part else gpu
            places.append(
                ReachableGpu(
                    machine=machine.name, gpu=gpu, cause=reason or few, unasked=unasked and bool(request.gpus)
                )
            )
    return JobReachability(places=tuple(places))


def _of_node(
    machine: PoolMachine, request: BatchRequest, only: Collection[str], not_on: Collection[str]
) -> tuple[str, bool]:
    """Return why the job cannot get a node, and whether the script excludes the node explicitly."""
    if not request.gpus:
        return "the job asks for no GPU", False
    if (only and machine.name not in only) or machine.name in not_on:
        return "its node is excluded by name", True
    features = {name for name in str(machine.attributes.get(FEATURES, "")).split(",") if name}
    if request.features is not None and not request.features(features):
        return "its node has not the features that are asked for", True
    for name, amount, unit, word in (
        ("memory", request.memory, MB, "little memory"),
        ("cpus", request.cpus, 1, "few CPUs"),
    ):
        most = machine.attributes.get(name)
        if isinstance(most, int | float) and not isinstance(most, bool) and most * unit < amount:
            return f"its node has too {word}", False
    return "", False


def _of_gpu(gpu: PoolGpu, request: BatchRequest, looked: Collection[str] | None) -> tuple[str, bool]:
    if request.kinds and gpu.name not in request.kinds:
        return "its type is not requested", True
    if looked is not None and gpu.capability not in looked:
        return "the script stops there", False
    return "", False


def _names(text: str) -> frozenset[str]:
    """Return the host names in a list such as `gpu[01-03,7],login`. Skips other notations."""
    return frozenset(
        name for part in re.findall(r"(?:\[[^\]]*\]|[^,\s])+", text) for name in _expand_hosts(part)
    )


def _expand_hosts(text: str) -> Iterator[str]:
    match = _HOSTS.fullmatch(text)
    if match is None:
        yield text
        return
    for part in match["numbers"].split(","):
        first, _, last = part.partition("-")
        if first.isdigit() and (last or first).isdigit():
            for number in range(int(first), min(int(last or first), int(first) + _MOST_HOSTS) + 1):
                yield f"{match['start']}{number:0{len(first)}}{match['end']}"
