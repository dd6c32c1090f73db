"""The frozen values of recipes: a family and the rows of its matrix, as they were read."""

from __future__ import annotations

from dataclasses import dataclass

from imagefactory.gpu.builds import ROCM
from imagefactory.model import BaseSpec, ContainerStart, FilesSpec, SourceLocation


@dataclass(frozen=True, slots=True, kw_only=True)
class RecipeRow:
    """One framework version of a recipe and the CUDA versions it comes with, or NO_CUDA alone; or its ROCm's.

    Fields that are not written in the row hold the family's value, so a row is complete by itself.
    `framework` is the recipe's, unless the row names another distribution as the build for CPUs or for ROCm.
    `description` and `labels` are what the row alone says, in place of the recipe's and beside them.
    `own_base` is the base that the recipe itself names by digest, None where `base` is one of bases.yaml.
    `places` says where single values were written (`base`, `cuda.0`), for errors that come later.

    `origins` are as a target's, of packages that it asks for, and so is `exclude`. `sources` are (`packages`
    or `pip`, entry) of folders and repositories without a wheel.

    `channels` (addresses), `priority`, `virtual` (as far as it is written) and `pip` are conda's alone. A
    row that is built `on` a target has no values of its own but what it adds, as it was written: that
    target's source decides what it may be.
    """

    version: str
    cuda: tuple[str, ...]
    extras: tuple[str, ...]
    python: str
    base: str
    platforms: tuple[str, ...]
    capabilities: tuple[str, ...]
    checks: tuple[str, ...]
    packages: tuple[str, ...]
    constraints: tuple[str, ...]
    environment: tuple[tuple[str, str], ...]
    where: SourceLocation
    framework: str = ""
    description: str = ""
    labels: tuple[tuple[str, str], ...] = ()
    own_base: BaseSpec | None = None
    places: tuple[tuple[str, SourceLocation], ...] = ()
    channels: tuple[str, ...] = ()
    priority: str = "strict"
    virtual: tuple[tuple[str, str], ...] = ()
    pip: tuple[str, ...] = ()
    on: str = ""
    waive: tuple[str, ...] = ()
    origins: tuple[tuple[str, str], ...] = ()
    rocm: tuple[str, ...] = ()
    sources: tuple[tuple[str, str], ...] = ()
    exclude: tuple[str, ...] = ()

    @property
    def builds(self) -> tuple[str, ...]:
        """The `cuda` of each of its targets on a platform."""
        return (*self.cuda, *(f"{ROCM}{version}" for version in self.rocm))


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """One family: a framework from one source with a matrix of versions x CUDA.

    `framework` is the distribution's name in the source (`torch`, `onnxruntime-gpu`);
    `python`, `base` and `platform` are the family's defaults, which a target's name leaves out. A family
    that is built on targets has none of these: each row's target brings them. `system` are Debian's packages
    that its images have beyond their base's.
    """

    family: str
    description: str
    source: str
    framework: str
    python: str
    base: str
    platform: str
    matrix: tuple[RecipeRow, ...]
    where: SourceLocation
    labels: tuple[tuple[str, str], ...] = ()
    files: tuple[FilesSpec, ...]
    start: ContainerStart
    system: tuple[str, ...]
