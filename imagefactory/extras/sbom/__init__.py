"""Bills of materials: the packages of a lock or an image with their licenses, as SPDX or CycloneDX."""
