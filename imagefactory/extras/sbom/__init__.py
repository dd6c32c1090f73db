"""Bills of materials: what a lock or an image is made of, by which licences, in the formats of others."""
