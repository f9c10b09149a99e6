"""Optimisations of a recorded program: functions from graph to graph, a file each.

Each file says what it replaces by what, when it applies, and what it may change in the numbers.
"""
