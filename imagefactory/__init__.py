"""imagefactory: GPU container images that are locked, reproducible and proven."""

__version__ = "0.1.0"
