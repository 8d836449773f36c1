"""The discharge rules: one file for each family of primitives."""
