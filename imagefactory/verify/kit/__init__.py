"""The program of a kit: a directory that verifies an image on a machine without imagefactory.

Every kit contains it, and it needs only Python 3.9's standard library. imagefactory reads its own machine
with the same `hardware.py`. kits.py writes a kit and reads its result.
"""
