"""What runs on the device: Triton programs and nothing else.

Every tensor has the clients first; images lie in memory as [clients, examples, rows, columns,
channels].  Capital names are constants of a compilation.  Offsets inside one client fit 32 bits,
those between clients need 64.
"""
