"""imagefactory: GPU container images that are locked, reproducible and verified."""

__version__ = "0.1.0"
