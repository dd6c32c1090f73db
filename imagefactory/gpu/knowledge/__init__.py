"""What is known about the world, as data with sources: tables that decisions look things up in.

    gpus.py       gpus, data_sheets, amd                GPUs by name, their speed, AMD processors and ROCm
    packages.py   pypi_cuda, companions, bounds,        CUDA that wheels come with, what goes with them,
                  conda_pypi, documented, releases,     what projects document, other indexes,
                  indexes, scanned, source_builds       scans of wheels, builds from source
    toolkits.py   cuda_drivers, gpu_drivers,            drivers, targets of toolkits, versions of PTX
                  cuda_targets, ptx_isa

The other tables here are read by the modules of the folder above that have their names.

A row is *documented* or measured from a package's own bytes, and names its source; it never says that an
image works. What a table does not hold is not known, which is not the same as false.
"""

from __future__ import annotations

from imagefactory.gpu.knowledge.gpus import (
    DataSheet,
    GpuModel,
    all_processors,
    amd_gpus,
    capabilities,
    data_sheets,
    find_data_sheet,
    find_gpu,
    gpus,
    newest_rocm,
    processors,
)
from imagefactory.gpu.knowledge.packages import (
    CompanionPackage,
    CudaWheel,
    DependencyBound,
    DocumentedSupport,
    ExternalIndexRow,
    FrameworkRelease,
    WheelScan,
    all_documented,
    bounds,
    companion_names,
    companions,
    companions_for,
    cuda_wheels,
    documented,
    external_indexes,
    families,
    is_known_index,
    last_with,
    newest_cuda,
    offered,
    pypi_names,
    releases,
    scanned,
    scanned_for_amd64,
    scanned_wheels,
)
from imagefactory.gpu.knowledge.toolkits import (
    cuda_drivers,
    cuda_targets,
    gpu_drivers,
    minor_floors,
    native_driver,
    ptx_cuda,
    targets_of,
)

__all__ = [
    "CompanionPackage",
    "CudaWheel",
    "DataSheet",
    "DependencyBound",
    "DocumentedSupport",
    "ExternalIndexRow",
    "FrameworkRelease",
    "GpuModel",
    "WheelScan",
    "all_documented",
    "all_processors",
    "amd_gpus",
    "bounds",
    "capabilities",
    "companion_names",
    "companions",
    "companions_for",
    "cuda_drivers",
    "cuda_targets",
    "cuda_wheels",
    "data_sheets",
    "documented",
    "external_indexes",
    "families",
    "find_data_sheet",
    "find_gpu",
    "gpu_drivers",
    "gpus",
    "is_known_index",
    "last_with",
    "minor_floors",
    "native_driver",
    "newest_cuda",
    "newest_rocm",
    "offered",
    "processors",
    "ptx_cuda",
    "pypi_names",
    "releases",
    "scanned",
    "scanned_for_amd64",
    "scanned_wheels",
    "targets_of",
]
