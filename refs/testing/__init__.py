"""Checks for functions over refs, to be used in your own tests."""

from refs.testing.in_place import assert_in_place as assert_in_place
from refs.testing.reversible import ReversibleReport as ReversibleReport
from refs.testing.reversible import check_reversible as check_reversible
from refs.testing.transforms import check_transforms as check_transforms
