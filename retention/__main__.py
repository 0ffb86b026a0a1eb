"""``python -m retention``."""

from retention.cli import app

if __name__ == "__main__":
    app(prog_name="retention")
