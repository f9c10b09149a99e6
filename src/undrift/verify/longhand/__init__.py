"""Every algorithm once more, written out in numpy: no line of the library takes part."""
