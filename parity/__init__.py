"""Finds where jaxdraft and torch_port disagree; the only package that imports both."""
