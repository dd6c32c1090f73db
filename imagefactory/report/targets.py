"""All about one target, as a person reads it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from imagefactory.gpu.builds import platform_of
from imagefactory.lock import Behind
from imagefactory.lock.files import Unsolvable
from imagefactory.model import Lock, Target
from imagefactory.oci.model import Image
from imagefactory.progress import format_bytes
from imagefactory.recipes.match_spec import channel_name
from imagefactory.views.text import CPUS, format_fields, format_table
from imagefactory.trust.verdict import Marks


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetState:
    """What there is of a target: its lock and the word for that, why it has none, its image.

    `promised` is the digest that an image has by the target's layer lock, empty where there is none.
    `behind` is what its lock holds of old releases, `left_out` what its family promises and it lacks.
    """

    lock: Lock | None
    state: str
    why: Unsolvable | None
    image: Image | None
    promised: str = ""
    behind: tuple[Behind, ...] = ()
    left_out: str = ""


def format_targets(rows: Sequence[tuple[Target, str, Marks]], width: int | None = None) -> str:
    """A row for each target: what it is, the state of its lock, and how far its image is."""
    header = ("TARGET", "FRAMEWORK", "CUDA", "PYTHON", "BASE", "LOCK", "BUILT", "PUSHED", "VERIFIED ON")
    table = [
        (
            target.name,
            f"{target.framework} {target.version}",
            target.cuda,
            target.python,
            target.base,
            state,
            "yes" if marks.built else "-",
            "yes" if marks.pushed else "-",
            " ".join(marks.verified) or ("-" if target.gpu else CPUS),
        )
        for target, state, marks in rows
    ]
    return format_table(header, table, width, ("BASE", "FRAMEWORK", "PYTHON", "CUDA"))


def format_target(target: Target, now: TargetState, width: int | None = None) -> str:
    """All about one target, for `show`."""
    fields = [
        ("description", target.description),
        ("framework", f"{target.framework} {target.version}, source {target.source}"),
        ("for", platform_of(target.cuda)),
        ("Python", f"{_python(target)} on {target.base}, {target.platform}"),
        ("capabilities", ", ".join(target.capabilities) or "none: it is for CPUs alone"),
        ("checks", ", ".join(target.checks)),
    ]
    if target.on:
        fields.append(("built on", target.on))
    if target.source == "conda":
        order = "the first that has a package" if target.priority == "strict" else "all alike"
        fields += [
            ("channels", "\n".join(target.channels)),
            ("priority", f"{target.priority}: {order}"),
            ("virtual", "\n".join(f"{name} {value}" for name, value in target.virtual)),
        ]
    fields.append(("requirements", "\n".join(target.requirements)))
    if target.pip:
        fields.append(("from PyPI", "\n".join(target.pip)))
    if target.origins:
        fields.append(("from", "\n".join(f"{name} from {origin}" for name, origin in target.origins)))
    if target.sources:
        fields.append(("to build", "\n".join(target.sources)))
    if target.constraints:
        fields.append(("constraints", "\n".join(target.constraints)))
    if target.environment:
        fields.append(("environment", "\n".join(f"{name}={value}" for name, value in target.environment)))
    fields.append(("recipe", str(target.where)))
    if now.left_out:
        fields.append(("left out", now.left_out))
    fields += _lock_fields(target, now)
    if now.behind:
        fields.append(("far behind", "\n".join(map(str, now.behind))))
    if now.image is None:
        fields.append(("image", f"not in the store: imagefactory build {target.name}"))
    else:
        size = f"{format_bytes(now.image.size)} in {len(now.image.layers)} layers"
        fields += [("image", f"{now.image.name}, {size}"), ("digest", now.image.digest)]
    if now.promised and (now.image is None or now.image.digest != now.promised):
        fields.append(("layers locked", f"the digest is {now.promised} where they are made as locked"))
    return f"{target.name}\n{format_fields(fields, width=width)}"


def _python(target: Target) -> str:
    of = f" of {channel_name(target.channels[0])}" if target.conda and target.source == "pypi" else ""
    return f"{target.python}{of}"


def _lock_fields(target: Target, now: TargetState) -> list[tuple[str, str]]:
    lock, again = now.lock, f"imagefactory lock {target.name}"
    if now.why is not None:
        told = (now.state, now.why.reason, now.why.hint, f"the solver's whole account: {again} --explain")
        fields = [("lock", "\n".join(line for line in told if line))]
    elif lock is None:
        fields = [("lock", f"{now.state}: {again}{' --build' if target.sources else ''}")]
    else:
        kinds = ((lock.conda, "conda's archives"), (lock.wheels, "wheels"))
        parts = [
            f"{len(packages)} package{'s' if len(packages) > 1 else ''}, "
            f"{format_bytes(sum(one.size for one in packages))} of {kind}"
            for packages, kind in kinds
            if packages
        ]
        fields = [("lock", f"{now.state}, {' and '.join(parts)}, by {lock.solver}")]
    if lock is None:
        return fields
    if lock.note:
        fields.append(("note", lock.note))
    brought = [
        f"{package.name} {package.version}"
        for package in lock.packages
        if package.name.startswith(("nvidia-", "cuda-", "cudatoolkit", "cudnn", "pytorch-cuda"))
    ]
    return [*fields, ("CUDA packages", "\n".join(brought))] if brought else fields
