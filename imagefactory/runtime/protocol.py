"""What every runner offers: a command inside an image, on this machine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from imagefactory.model import Completed, RunSpec
from imagefactory.oci.layout import Layout
from imagefactory.oci.model import Image, Sif
from imagefactory.oci.unpack import Unpacked
from imagefactory.progress import Progress


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerGround:
    """What a runner may need of this machine; the module of each has a `make_runner` that takes it.

    `workers` layers are unpacked at once, `ensure_sif` gives the kept .sif of an image of the store.
    """

    layout: Layout
    environ: Mapping[str, str]
    progress: Progress
    workers: int
    ensure_sif: Callable[[Image], Sif]


class Runner(Protocol):
    """`unpacked` is where it starts images from, layer by layer; None for one that takes them whole."""

    @property
    def unpacked(self) -> Unpacked | None: ...

    def require(self) -> str:
        """The runner's version. Raises ToolError, with the command that mends it, when it cannot run here."""

    def prepare(self, made: Image | Sif, *, checked: bool) -> Image | Sif:
        """`made` as this runner starts it, brought to where it starts things from.

        `checked`: a verdict follows, so what the store has unpacked for it is looked at first. The caller
        holds the layout's `in_use`: no collection takes what is on its way.
        """

    def run(self, image: Image | Sif, spec: RunSpec) -> Completed:
        """Runs `spec.argv` in `image`, which stays untouched.

        A command that fails or times out is a result, not an error; ToolError and StoreError mean that
        it was never started. ToolError too for a kind of image that this runner cannot run.
        """
