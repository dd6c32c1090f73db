"""What starts images. One runner, one file, one row in settings/choices.py."""
