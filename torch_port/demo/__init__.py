"""The demo: a target trained on the standard library's source, and drafts trained for it."""
