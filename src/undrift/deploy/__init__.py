"""From a simulation to machines: the files of a federation, a try-out, a check."""
