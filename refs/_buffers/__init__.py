"""Refs' buffers: everything that makes an operation on refs atomic is in this package."""
