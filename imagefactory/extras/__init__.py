"""What the pipeline does not need: one folder each, which can be deleted."""
