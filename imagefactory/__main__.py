"""Run `python -m imagefactory`."""

from imagefactory.cli import main

main()
