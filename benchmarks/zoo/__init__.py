"""Models of other packages, as data: models.txt for third_party.py, timed.txt for peers.py, and
families.py's lists of names."""

from pathlib import Path

from zoo.row import rows

ROWS = tuple(rows(Path(__file__).with_name("models.txt")))
