"""Reversible functions: the backward pass undoes what the forward pass did, and stores nothing."""
