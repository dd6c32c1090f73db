"""GPU code in files, wheels, conda packages, layers and images, found only from their bytes."""
