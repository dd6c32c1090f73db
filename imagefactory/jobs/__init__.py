"""Job files for researchers: the images on offer, their verdicts, and the text of the files."""
