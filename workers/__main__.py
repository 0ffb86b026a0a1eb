"""``python -m workers``: the same as ``reprise worker``."""

from workers.cli import app

app()
