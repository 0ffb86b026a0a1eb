"""Prefill and decode workers: stateless over the block store."""
