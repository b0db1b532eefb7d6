"""What the two implementations must agree on, one module per kind of check."""
