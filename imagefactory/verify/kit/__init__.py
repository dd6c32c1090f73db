"""The program of a kit: a folder that verifies an image on a machine without imagefactory.

It travels in every kit and needs nothing but Python 3.9's standard library; this process reads its own
machine with the same `hardware.py`. kits.py writes a kit and reads what it brought back.
"""
