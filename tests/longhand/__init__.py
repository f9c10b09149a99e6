"""Long-hand numpy versions of the algorithms: they judge the library and import none of it."""
