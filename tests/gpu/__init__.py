"""What needs a GPU, in one command: `tests/run gpu`. It needs the standard library alone."""
