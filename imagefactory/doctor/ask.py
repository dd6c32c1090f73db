"""Asks what a build or push needs whether it works: engines, package index, Debian's archive, registry."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from imagefactory.access import Access, conda_channels, debian_mirror, open_registry, package_index, uv_locker
from imagefactory.doctor.facts import Probe
from imagefactory.build.secrets import find_secrets
from imagefactory.build.docker import DockerEngine
from imagefactory.errors import FactoryError, ToolError, extra_hint
from imagefactory.lock.conda.own_tool import find_tool
from imagefactory.lock.debian.archive import reach
from imagefactory.oci.credentials import find_credentials
from imagefactory.oci.mirrors import split_place
from imagefactory.recipes.read import read_bases
from imagefactory.runtime.apptainer_command import ApptainerCommand
from imagefactory.runtime.docker_daemon import DockerDaemon
from imagefactory.settings.choices import SOLVERS
from imagefactory.settings.load import Settings
from imagefactory.http import Patience, redact

SECONDS = 10
"""How long one thing of the network may take to answer."""


def ask_all(access: Access, names: Collection[str] | None = None) -> tuple[Probe, ...]:
    """Asks engines, package index, Debian's archive and the registry, all at once: each may be slow.

    Of them only `names`, where these are given.
    """
    questions: dict[str, Callable[[Access], str]] = {
        "docker": _ask_docker,
        "apptainer": _ask_apptainer,
        "conda": _ask_conda,
        "package index": _ask_index,
        "debian mirror": _ask_mirror,
    }
    if access.settings.registry.value:
        questions["registry"] = _ask_registry
    asked = [name for name in questions if names is None or name in names]
    with ThreadPoolExecutor(len(questions)) as pool:
        return tuple(pool.map(lambda name: _ask(name, lambda: questions[name](access)), asked))


def _ask(name: str, question: Callable[[], str]) -> Probe:
    try:
        return Probe(name=name, found=question())
    except FactoryError as error:
        return Probe(name=name, refusal=error.message, remedy=error.hint)
    except ModuleNotFoundError as error:
        extra = name if name in ("docker", "apptainer") else "build"
        return Probe(
            name=name,
            refusal=f"{error.name} is not installed",
            remedy=extra_hint(extra),
        )


def _ask_docker(access: Access) -> str:
    engine = DockerEngine(
        access.layout,
        DockerDaemon(access.environ),
        codec=access.settings.codec.value,
        secrets=lambda _: find_secrets(package_index(access), access.environ),
    )
    return engine.require()


def _ask_apptainer(access: Access) -> str:
    return f"apptainer {ApptainerCommand(access.environ).require(building=True)}"


def _ask_conda(access: Access) -> str:
    """What solves and links conda's packages. Channels are not asked: recipes say which."""
    try:
        tools = f"py-rattler {importlib.metadata.version('py-rattler')}"
    except importlib.metadata.PackageNotFoundError:
        raise ToolError(
            "extra-not-installed", "py-rattler is not installed", hint=extra_hint("conda")
        ) from None
    solver = access.settings.solver.value
    if solver != SOLVERS[0]:
        tools += f", {find_tool(solver, access.environ).name()} solves"
    mirrors = conda_channels(access).mirrors
    elsewhere = ", ".join(f"{true} at {redact(asked)}" for true, asked in mirrors)
    return tools + (f"; {elsewhere}" if elsewhere else "")


def _ask_index(access: Access) -> str:
    index = package_index(access)
    patience = (("UV_HTTP_TIMEOUT", str(SECONDS)), ("UV_HTTP_RETRIES", "0"))
    impatient = replace(index, environment=(*index.environment, *patience))
    uv_locker(impatient).reach()
    return f"{redact(index.url)} ({index.origin}) answers" if index.url else f"{index.origin} answers"


def _ask_mirror(access: Access) -> str:
    """Asks for what `lock` and a base's build begin with, by apt's own means."""
    suites = _suites(access.settings)
    reach(debian_mirror(access), suites, seconds=SECONDS)
    return f"{', '.join(suites)} found there"


def _suites(settings: Settings) -> tuple[str, ...]:
    """The suites of the factory's bases."""
    try:
        bases = read_bases(settings.root_path / "recipes")
    except FactoryError:
        return ("stable",)  # a recipe's fault is not the machine's
    return tuple(dict.fromkeys(base.suite for base in bases if base.suite)) or ("stable",)


def _ask_registry(access: Access) -> str:
    place = access.settings.registry.value
    patience = Patience(attempts=1, connect=SECONDS, read=SECONDS)
    host = split_place(place)[0]
    registry, known = open_registry(access, host, patience=patience), find_credentials(access.environ)(host)
    try:
        registry.check()
    finally:
        registry.close()
    kept = f"with the credentials from {known.origin or 'a helper'}" if known else "without credentials"
    return f"{place} answers {kept}"
