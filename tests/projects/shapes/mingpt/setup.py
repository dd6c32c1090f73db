from setuptools import setup

setup(name="minGPT", version="1.0.0", packages=["mingpt"], install_requires=["torch"])
