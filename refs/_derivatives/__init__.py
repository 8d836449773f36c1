"""What the transformations that differentiate share."""
