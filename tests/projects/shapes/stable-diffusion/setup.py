from setuptools import find_packages, setup

setup(
    name="latent-diffusion",
    version="1.0.0",
    packages=find_packages(),
    install_requires=["torch", "numpy", "tqdm"],
)
