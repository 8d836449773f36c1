"""Who has a ref's buffer: all that makes an operation on refs atomic is in this room."""
