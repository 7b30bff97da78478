"""Reading of untrusted files in bounded time and memory, and atomic writing; every reader and
writer of this package uses these modules.
"""
