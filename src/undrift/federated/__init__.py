"""Federations of machines: the same algorithms, with data and client states at their owners."""
