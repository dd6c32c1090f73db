"""Find GPU code in files, wheels, conda packages, layers and images, from their bytes only."""
