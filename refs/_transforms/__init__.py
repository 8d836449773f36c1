"""The public transformations of functions over refs."""
