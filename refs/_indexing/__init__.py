"""NumPy's complete indexing of refs, and the conversion of values that are written to them."""
