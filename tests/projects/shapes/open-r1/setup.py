"""The dependencies stand in one list, and each group is picked out of it by name: nothing here is literal."""

import re

from setuptools import find_packages, setup

PINS = [
    "accelerate==1.4.0",
    "bitsandbytes>=0.43.0",
    "datasets>=3.2.0",
    "deepspeed==0.16.8",
    "einops>=0.8.0",
    "hf_transfer>=0.1.4",
    "huggingface-hub[cli,hf_xet]>=0.30.2,<1.0",
    "langdetect",
    "latex2sympy2_extended>=1.0.6",
    "liger-kernel>=0.5.10",
    "math-verify==0.5.2",
    "packaging>=23.0",
    "safetensors>=0.3.3",
    "sentencepiece>=0.1.99",
    "torch==2.6.0",
    "transformers==4.52.3",
    "trl[vllm]==0.18.0",
    "wandb>=0.19.1",
    "async-lru>=2.0.5",
]
by_name = {re.split(r"[\[=<>]", pin)[0]: pin for pin in PINS}

setup(
    name="open-r1",
    version="1.0.0",
    package_dir={"": "src"},
    packages=find_packages("src"),
    python_requires=">=3.10.9",
    install_requires=[by_name[name] for name in by_name if name != "torch"],
    extras_require={"torch": [by_name["torch"]]},
)
