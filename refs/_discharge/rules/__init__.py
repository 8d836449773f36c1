"""The discharge rules, a family of primitives in each file."""
