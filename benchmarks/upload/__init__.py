"""Copying a committed checkpoint to an object store and reading it back, beside s3fs's own upload."""
