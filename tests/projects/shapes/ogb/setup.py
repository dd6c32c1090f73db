import sys
from pathlib import Path

from setuptools import find_packages, setup

sys.path.insert(0, str(Path(__file__).parent / "ogb"))
from version import __version__

setup(
    name="ogb",
    version=__version__,
    packages=find_packages(exclude=["examples"]),
    install_requires=[
        "torch>=1.6.0",
        "numpy>=1.16.0",
        "tqdm>=4.29.0",
        "scikit-learn>=0.20.0",
        "pandas>=0.24.0",
        "six>=1.12.0",
        "urllib3>=1.24.0",
        "outdated>=0.2.0",
        "joblib>=1.3.2",
    ],
)
