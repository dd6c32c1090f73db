"""Reads its dependencies from the requirements file beside it."""

from pathlib import Path

from setuptools import find_packages, setup

lines = Path(__file__).with_name("requirements.txt").read_text().splitlines()

setup(
    name="clip",
    version="1.0",
    packages=find_packages(exclude=["tests*"]),
    install_requires=[line for line in lines if line and not line.startswith("#")],
    extras_require={"dev": ["pytest"]},
)
