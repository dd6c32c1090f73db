"""Dependencies by name of a list, extras by name of a table, and a CUDA extension where torch is there."""

import os

from setuptools import find_packages, setup

NEEDS = [
    "torch>=2.5.1",
    "torchvision>=0.20.1",
    "numpy>=1.24.4",
    "tqdm>=4.66.1",
    "hydra-core>=1.3.2",
    "iopath>=0.1.10",
    "pillow>=9.4.0",
]
EXTRAS = {
    "notebooks": ["matplotlib>=3.9.1", "jupyter>=1.0.0", "opencv-python>=4.7.0", "eva-decord>=0.6.1"],
    "interactive-demo": [
        "Flask>=3.0.3",
        "Flask-Cors>=5.0.0",
        "av>=13.0.0",
        "dataclasses-json>=0.6.7",
        "eva-decord>=0.6.1",
        "gunicorn>=23.0.0",
        "imagesize>=1.4.1",
        "pycocotools>=2.0.8",
        "strawberry-graphql>=0.243.0",
    ],
}


def extensions() -> list[object]:
    if os.getenv("SAM2_BUILD_CUDA", "1") != "1":
        return []
    from torch.utils.cpp_extension import CUDAExtension

    return [CUDAExtension("sam2._C", ["sam2/csrc/connected_components.cu"])]


setup(
    name="SAM-2",
    version="1.0",
    packages=find_packages(),
    install_requires=NEEDS,
    extras_require=EXTRAS,
    python_requires=">=3.10.0",
    ext_modules=extensions(),
)
