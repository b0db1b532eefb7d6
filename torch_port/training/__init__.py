"""Training: the optimizer of spec sheet §14, the step, and the loop."""
