"""Job files for researchers: the offered images, their verdicts, and the text of the files."""
