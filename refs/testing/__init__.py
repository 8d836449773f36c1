"""Checks for functions over refs, to be used in your own tests."""

from refs.testing.transforms import check_transforms as check_transforms
