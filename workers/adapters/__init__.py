"""Attachment of other engines, one file each."""
