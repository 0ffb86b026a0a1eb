"""The daemon that owns a host's shards: the only place that knows segments, the index and the disk."""
