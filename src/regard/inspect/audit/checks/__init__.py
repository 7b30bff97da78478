"""Checks, one matter a file: `table.py` lists them all."""
