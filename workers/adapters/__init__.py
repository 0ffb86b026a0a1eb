"""Adapters through which engines of others attach to the store, one file each; the only importers of those engines."""
