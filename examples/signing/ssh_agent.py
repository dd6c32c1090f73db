#!/usr/bin/env python3
"""A signing program for imagefactory: sign stdin with an Ed25519 key that ssh-agent holds.

    imagefactory key create lab --command '/path/ssh_agent.py /home/me/.ssh/lab.pub' --public ~/.ssh/lab.pub

gpg-agent answers too (enable-ssh-support), with a key of a smart card. A key of type sk-ssh-ed25519 does not
work: it signs something else. Protocol: draft-ietf-sshm-ssh-agent, 3.6; signature: RFC 8709.
"""

import base64
import os
import socket
import sys
from pathlib import Path

SIGN_REQUEST, SIGN_RESPONSE = 13, 14


def string(data: bytes) -> bytes:
    return len(data).to_bytes(4, "big") + data


def receive(agent: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = agent.recv(size - len(data))
        if not part:
            sys.exit("ssh-agent closed the connection")
        data += part
    return data


def sign(address: str, key: bytes, data: bytes) -> bytes:
    with socket.socket(socket.AF_UNIX) as agent:
        try:
            agent.connect(address)
        except OSError as error:
            sys.exit(f"no ssh-agent answers at {address} (SSH_AUTH_SOCK): {error.strerror}")
        agent.sendall(string(bytes([SIGN_REQUEST]) + string(key) + string(data) + bytes(4)))
        size = int.from_bytes(receive(agent, 4), "big")
        answer = receive(agent, min(size, 1 << 16))
    head = string(b"ssh-ed25519") + (64).to_bytes(4, "big")
    if answer[:1] != bytes([SIGN_RESPONSE]) or answer[5:-64] != head:
        sys.exit("ssh-agent does not sign with that key: ssh-add -L lists those that it holds")
    return answer[-64:]


kind, text, *_ = Path(sys.argv[1]).read_text().split()
if kind != "ssh-ed25519":
    sys.exit(f"{sys.argv[1]} is not an ssh-ed25519 key")
if "SSH_AUTH_SOCK" not in os.environ:
    sys.exit("no ssh-agent here: SSH_AUTH_SOCK is not set")
signature = sign(os.environ["SSH_AUTH_SOCK"], base64.b64decode(text), sys.stdin.buffer.read())
sys.stdout.buffer.write(signature)
