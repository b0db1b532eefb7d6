"""The production implementation of pruned speculative drafts, in torch and torch_npu."""
