"""What bytes hold for GPUs: files, wheels, conda packages, layers and images, by what is in them alone."""
