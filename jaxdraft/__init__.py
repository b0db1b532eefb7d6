"""The executable specification of pruned speculative drafts, in JAX and Flax."""
