"""One tuple in place of targets (`--tuple pytorch 2.3 12.1 8.0`): read, and the target of it. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from imagefactory.errors import NothingSelectedError, UsageError
from imagefactory.gpu.capability import Capability, parse_capability
from imagefactory.gpu.knowledge import families
from imagefactory.model import Target
from imagefactory.versions import nearest

SHORT_NAMES = {"pt": "pytorch", "tf": "tensorflow"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuple:
    """Framework, its version, CUDA and compute capability: what CHTC's old tool tested, one at a time."""

    framework: str
    version: str
    cuda: str
    capability: Capability


def parse_tuple(words: Sequence[str]) -> Tuple:
    """`pytorch 2.3 12.1 8.0`. Raises UsageError naming the word that cannot be."""
    framework, version, cuda, capability = words
    for word, text, example in ((version, "version", "2.3"), (cuda, "CUDA version", "12.1, or 12")):
        if not re.fullmatch(r"[0-9]{1,4}(\.[0-9]{1,6}){0,3}", word, re.ASCII):
            raise UsageError(
                "option-invalid", f"--tuple: '{word[:40]}' is not a {text}", hint=f"write {example}"
            )
    try:
        wanted = parse_capability(capability)
    except ValueError as error:
        raise UsageError(
            "option-invalid", f"--tuple: {error}", hint="write --tuple pytorch 2.3 12.1 8.0"
        ) from error
    name = framework.lower()
    return Tuple(framework=SHORT_NAMES.get(name, name), version=version, cuda=cuda, capability=wanted)


def choose_tuple(targets: Sequence[Target], asked: Tuple) -> Target:
    """The target of a tuple. Raises NothingSelectedError where no recipe has it, UsageError for several."""
    known = {target.family for target in targets} | {target.framework for target in targets}
    if asked.framework not in known:
        near = nearest(asked.framework, known)
        raise NothingSelectedError(
            "target-unknown",
            f"no recipe has the framework '{asked.framework[:40]}'",
            hint=f"did you mean '{near}'?" if near else f"frameworks: {', '.join(sorted(known))}",
        )
    distribution = families().get(asked.framework, asked.framework)
    ranks = [target for target in targets if target.family == asked.framework] or [
        target for target in targets if asked.framework in (target.framework, distribution)
    ]
    fitting = [
        target
        for target in ranks
        if _is_of(target.version, asked.version) and _is_of(asked.cuda, target.cuda)
    ]
    shortest = min((len(target.name) for target in fitting), default=0)
    # A suffix names what is not the default.
    plain = [target for target in fitting if len(target.name) == shortest]
    if not plain:
        offered = ", ".join(f"{target.version} cu{target.cuda}" for target in ranks)
        raise NothingSelectedError(
            "target-unknown",
            f"no recipe has {asked.framework} {asked.version} with CUDA {asked.cuda}",
            hint=f"versions: {offered}",
        )
    if len(plain) > 1:
        raise UsageError(
            "target-ambiguous",
            f"{asked.framework} {asked.version} with CUDA {asked.cuda} matches {len(plain)} targets",
            hint=f"pass one of them: {', '.join(target.name for target in plain)}",
        )
    return plain[0]


def _is_of(version: str, prefix: str) -> bool:
    """By whole parts: 2.3.1 is of 2.3, and 12.1 of 12."""
    return version == prefix or version.startswith(f"{prefix}.")
