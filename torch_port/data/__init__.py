"""Conversations, token ids, captured features, and the batches made of them."""
