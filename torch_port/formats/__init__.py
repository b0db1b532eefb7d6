"""Draft checkpoints in the field's formats: reading, checking, converting, showing."""
