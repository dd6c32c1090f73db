"""A conda target and its lock."""

from __future__ import annotations

from imagefactory.lock.changes import content_hash
from imagefactory.model import SourceLocation
from tests.made.values import FORGE, make_base, make_conda, make_lock, make_target

PYTORCH = "https://conda.anaconda.org/pytorch"
BASE = make_base()
TARGET = make_target(
    name="pytorch-conda-2.3-cu121",
    family="pytorch-conda",
    source="conda",
    framework="pytorch",
    requirements=("pytorch 2.3.*", "pytorch-cuda 12.1.*"),
    constraints=("numpy <2",),
    where=SourceLocation(file="recipes/pytorch-conda.yaml", line=7, column=5),
    channels=(PYTORCH, FORGE),
    virtual=(("__archspec", "x86_64"), ("__cuda", "12.1"), ("__glibc", "2.36")),
)
LOCK = make_lock(
    target=TARGET.name,
    content_hash=content_hash(TARGET, BASE, None),
    solver="py-rattler 0.28.0",
    wheels=(),
    conda=(
        make_conda("_libgcc_mutex 0.1 conda_forge"),
        make_conda("cuda-cudart 12.1.105 0", "__glibc >=2.17,<3.0.a0"),
        make_conda("numpy 1.26.4 py311h64a7726_0", "python >=3.11,<3.12.0a0", "python_abi 3.11.* *_cp311"),
        make_conda("pip 24.0 pyhd8ed1ab_0", "python >=3.7", "setuptools", subdir="noarch"),
        make_conda("python 3.11.9 hb806964_0_cpython", "_libgcc_mutex"),
        make_conda("python_abi 3.11 4_cp311"),
        make_conda(
            "pytorch 2.3.1 py3.11_cuda12.1_cudnn8.9.2_0",
            "numpy >=1.19,<2",
            "python >=3.11",
            "pytorch-cuda >=12.1,<12.2",
            channel=PYTORCH,
        ),
        make_conda("pytorch-cuda 12.1 ha16c6d3_6", "cuda-cudart >=12.1,<12.2", channel=PYTORCH),
        make_conda("setuptools 1!70.0 pyhd8ed1ab_0", "python", subdir="noarch"),
    ),
    channels=(PYTORCH, FORGE),
    virtual=TARGET.virtual,
)
