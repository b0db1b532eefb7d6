"""Make the hand-written checkpoints of tests/formats importable here."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "formats"))
