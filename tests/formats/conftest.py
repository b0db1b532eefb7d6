"""Make tests/formats/format_toys.py importable under one name."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

# Runs in the environment of the public package, not in ours.
collect_ignore = ["public_speculators.py"]
