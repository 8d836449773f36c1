"""A call over refs as a pure function, for the transformations that differentiate it."""
