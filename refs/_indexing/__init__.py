"""What an index means, and what a value is that goes into a ref: NumPy's rules, complete."""
