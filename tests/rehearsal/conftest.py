"""Make tests/rehearsal/rehearsal_toys.py and tests/port's helpers importable under one name."""

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "port")]
