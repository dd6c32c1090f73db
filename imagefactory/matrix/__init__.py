"""Tables of targets and GPUs, from predictions and verdicts for each cell. No I/O."""
