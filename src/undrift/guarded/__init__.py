"""Bytes from outside, read within limits; whatever is wrong with them is one error of ours.

limits.py says how much a file may ask for, text.py reads JSON, TOML and lines, binary.py arrays,
archives and compressed files.  A structure test holds that nothing else parses such bytes.
"""
