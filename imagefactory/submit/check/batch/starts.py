"""Where a batch script starts an image: apptainer, docker, podman, or Slurm's plugin pyxis. Pure.

Source: apptainer exec(1), docker run(1), podman-run(1), NVIDIA's pyxis, "Usage".
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from imagefactory.model import Where
from imagefactory.schedulers.pool import ImageKind
from imagefactory.recipes.shell_words import Shell, ShellCommand, Word
from imagefactory.extras.lint.batch_reader import BatchScript
from imagefactory.submit.check.findings import Spot
from imagefactory.extras.lint.image import JobImage, addressed, has_host, referred

APPTAINER, DOCKER, PYXIS = ("apptainer", "singularity"), ("docker", "podman"), "container-image"
_SAYS = ("echo", "printf", "which", "type", "module", "ml", "alias", "man", "hash", "test", "[", "[[")
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
class Start:
    """One line that starts an image. `image` is its word, None where none stands there; `named` is what that
    names, None where it is filled in when the script runs. `given` are the options before it."""

    program: str
    verb: str
    at: Spot
    image: Word | None
    named: JobImage | None
    given: tuple[str, ...]
    command: ShellCommand | None

    def has(self, *options: str) -> bool:
        return any(one.partition("=")[0] in options for one in self.given)


def find_starts(script: BatchScript) -> tuple[Start, ...]:
    """All of them, in order; one that #SBATCH names first."""
    found = []
    if option := script.options.get(PYXIS):
        where = Where(file="", line=option.at.line, column=option.at.column)
        word = Word(option.value, where, known="$" not in option.value)
        found.append(_by_pyxis(word, "sbatch", None))
    return (*found, *(_in_shell(script.shell) if script.shell else ()))


def _in_shell(shell: Shell) -> Iterator[Start]:
    for command in shell.commands:
        words = command.words
        if words[0].text in _SAYS:
            continue
        programs = [word.text.rpartition("/")[2] for word in words]
        place = next((at for at, name in enumerate(programs) if name in (*APPTAINER, *DOCKER)), None)
        own = words if place is None else words[:place]
        pyxis = _pyxis_image(own) if programs[0] == "srun" else None
        if pyxis is not None:
            yield _by_pyxis(pyxis, "srun", command)
        elif place is not None:
            yield from _by_program(programs[place], words[place:], command)


def _by_program(program: str, words: Sequence[Word], command: ShellCommand) -> Iterator[Start]:
    docker = program in DOCKER
    valued = _DOCKER_VALUED if docker else _VALUED
    verb, rest = _operand(words[1:], valued)
    if docker and verb and verb.text == "container":
        verb, rest = _operand(rest, valued)
    if verb is None or verb.text not in (("run",) if docker else _RUNS):
        return
    image, after = _operand(rest, valued)
    given = rest[: len(rest) - len(after) - 1] if image else rest
    before = words[1 : words.index(verb)]
    named = None
    if image is not None and image.known:
        named = (
            referred(program, image.text, ImageKind.DOCKER, "HasDocker")
            if docker
            else addressed(program, image.text)
        )
    yield Start(
        program=program,
        verb=verb.text,
        at=Spot(words[0].where.line, words[0].where.column),
        image=image,
        named=named,
        given=tuple(one.text for one in (*before, *given)),
        command=command,
    )


def _operand(words: Sequence[Word], valued: set[str]) -> tuple[Word | None, Sequence[Word]]:
    """The first word that is no option and no option's value, and what follows it."""
    at = 0
    while at < len(words):
        text = words[at].text
        if not text.startswith("-") or text == "-":
            return words[at], words[at + 1 :]
        at += 2 if text in valued else 1
    return None, ()


def _pyxis_image(words: Sequence[Word]) -> Word | None:
    for at, word in enumerate(words):
        name, equals, value = word.text.partition("=")
        if name == f"--{PYXIS}":
            if equals:
                where = replace(word.where, column=word.where.column + len(name) + 1)
                return Word(value, where, word.known)
            return words[at + 1] if at + 1 < len(words) else None
    return None


def _by_pyxis(word: Word, program: str, command: ShellCommand | None) -> Start:
    """Its images are `[USER@][HOST#]NAME[:TAG]`, or a path of a file; it brings GPUs by itself."""
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
    return Start(
        program=program,
        verb=PYXIS,
        at=Spot(word.where.line, word.where.column),
        image=word,
        named=named,
        given=(),
        command=command,
    )


_OF_ENROOT = ("dockerd://", "podman://")
"""Images of a node's own docker or podman, as enroot names them; pyxis takes them since 0.14."""


def _is_path(text: str) -> bool:
    """Whether pyxis takes it for a file: only with / or ./ in front."""
    return text.startswith(("/", "./"))


def misread_by_pyxis(text: str) -> tuple[str, str] | None:
    """What pyxis does with an image that was meant otherwise, and what to write; None where all is well."""
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
    """`registry.example.org/gpu/pytorch@sha256:...` as pyxis takes it."""
    host, _, name = reference.partition("/")
    return f"{host}#{name}"
