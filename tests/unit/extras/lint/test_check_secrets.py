"""Secrets in files that others see, and what is none."""

from __future__ import annotations

import pytest

from imagefactory.extras.lint.check import secret_findings

# Put together here, so that no file of this tree holds what looks like one.
KEY = "0123456789abcdef" * 2 + "01234567"


@pytest.mark.parametrize(
    ("line", "name", "column"),
    [
        (f"export WANDB_API_KEY={KEY}", "WANDB_API_KEY", 8),
        (f'environment = "A=1 WANDB_API_KEY={KEY}"', "WANDB_API_KEY", 20),
        (f"#SBATCH --export=ALL,HF_TOKEN={'hf_' + 'a' * 34}", "HF_TOKEN", 22),
        ("AWS_SECRET_ACCESS_KEY='abcdefghijkl'", "AWS_SECRET_ACCESS_KEY", 1),
        ("db_password = hunter2hunter2", "db_password", 1),
        (f"python train.py --key {'hf_' + 'a' * 34}", "a Hugging Face token", 23),
        (f"wandb login --relogin {KEY}", "a Weights & Biases key", 1),
        ("git clone https://" + "ghp_" + "a" * 36 + "@example.org/x", "a GitHub token", 19),
        (f"aws configure set aws_access_key_id {'AKIA' + 'A' * 16}", "an AWS key", 37),
        (f"-----BEGIN OPENSSH {'PRIVATE'} KEY-----", "a private key", 1),
    ],
)
def test_a_secret_is_told_by_its_name_and_never_shown(line: str, name: str, column: int) -> None:
    (found,) = secret_findings(f"#!/bin/bash\n{line}\n")
    assert (found.line, found.column, found.rule) == (2, column, "secret")
    assert found.message.startswith(f"{name} ")
    assert KEY not in found.message + found.hint


@pytest.mark.parametrize(
    "line",
    [
        "export WANDB_API_KEY=$(cat ~/.wandb-key)",
        "export WANDB_API_KEY=$WANDB_API_KEY",
        'export HF_TOKEN="$(< $HOME/.hf)"',
        "HF_TOKEN_PATH=/home/me/.cache/token",
        "HF_TOKEN_PATH=~/.cache/huggingface/token",
        "export TOKENIZERS_PARALLELISM=false",
        "arguments = --max-tokens=4096 --api-key-file=key.txt",
        "MAX_TOKENS=1000000000",
        "TOKENIZER=bert-base-uncased",
        "image = docker://registry.example.org/gpu@sha256:" + "a" * 64,
    ],
)
def test_what_is_none(line: str) -> None:
    assert list(secret_findings(line)) == []
