"""``python -m gateway``: the same as ``reprise gateway``."""

from gateway.cli import app

if __name__ == "__main__":
    app(prog_name="reprise gateway")
