"""Benchmarks of the training step: `python -m benchmarks.step --compare`. Not packaged."""
