"""Values of recipes: a family and the rows of its matrix, before expansion."""

from __future__ import annotations

from dataclasses import dataclass

from imagefactory.gpu.values import ROCM
from imagefactory.model import (
    BaseSpec,
    ContainerStart,
    EnvironmentValues,
    FilesSpec,
    FrozenSpec,
    SourceLocation,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RecipeRow(EnvironmentValues):
    """One framework version of a recipe with its CUDA versions, or only NO_CUDA, or its ROCm versions.

    A row is complete: values that are not written in the row are the family's. Only `description` and
    `labels` are the row's own. `virtual` has only the written ones. `own_base` is the base that the recipe
    describes by digest, None if `base` is in bases.yaml. `places` are the locations of single values
    (`base`, `cuda.0`), for later errors. `sources` are (`packages` or `pip`, entry) of directories and
    repositories without a wheel.

    A row that is built `on` a target has only its additions, as written, because they depend on that
    target's source.
    """

    packages: tuple[str, ...]
    cuda: tuple[str, ...] = ()
    rocm: tuple[str, ...] = ()
    extras: tuple[str, ...] = ()
    platforms: tuple[str, ...] = ()
    own_base: BaseSpec | None = None
    places: tuple[tuple[str, SourceLocation], ...] = ()
    on: str = ""
    sources: tuple[tuple[str, str], ...] = ()

    @property
    def builds(self) -> tuple[str, ...]:
        """The `cuda` of each of its targets on a platform."""
        return (*self.cuda, *(f"{ROCM}{version}" for version in self.rocm))


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """A family: a framework from one source with a matrix of versions x CUDA.

    `framework` is the distribution's name in the source (`torch`, `onnxruntime-gpu`). `python`, `base` and
    `platform` are the family's defaults, which target names omit. A family that is built on targets has none
    of these, because its rows' targets set them. `system` are the Debian packages that its images have
    besides those of their base.
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
    frozen: FrozenSpec | None = None
