"""The transformations, one public function a file."""
