"""What every runner offers: a command inside an image, on this machine."""

from __future__ import annotations

from typing import Protocol

from imagefactory.model import Completed, RunSpec
from imagefactory.oci.model import Image, Sif


class Runner(Protocol):
    def require(self) -> str:
        """The runner's version. Raises ToolError, with the command that mends it, when it cannot run here."""

    def run(self, image: Image | Sif, spec: RunSpec) -> Completed:
        """Runs `spec.argv` in `image`, which stays untouched.

        A command that fails or times out is a result, not an error; ToolError and StoreError mean that
        it was never started. ToolError too for a kind of image that this runner cannot run.
        """
