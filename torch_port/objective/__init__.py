"""The draft's objective: per-slot terms, their sums, and the loss assembled over ranks."""
