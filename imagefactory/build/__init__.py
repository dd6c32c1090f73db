"""What makes images. One engine, one file, one row in settings/choices.py."""
