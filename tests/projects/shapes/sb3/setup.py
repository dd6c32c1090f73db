from pathlib import Path

from setuptools import find_packages, setup

__version__ = Path("stable_baselines3", "version.txt").read_text().strip()

setup(
    name="stable_baselines3",
    version=__version__,
    packages=[package for package in find_packages() if package.startswith("stable_baselines3")],
    python_requires=">=3.10",
    install_requires=["gymnasium>=0.29.1,<2.0", "numpy>=1.20,<3.0", "torch>=2.8,<3.0", "cloudpickle"],
    extras_require={
        "extra": [
            "opencv-python",
            "pygame-ce",
            "tensorboard>=2.9.1",
            "psutil",
            "tqdm",
            "rich",
            "ale-py>=0.9.0",
            "pillow",
            "pandas",
            "matplotlib",
        ],
    },
)
