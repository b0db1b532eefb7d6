"""Errors that a user can act on: the message says what was expected, what came, the remedy."""


class UserError(ValueError):
    """A mistake in what the user gave; the message names the setting and the remedy."""


class NotBuiltError(UserError):
    """A setting that is valid in the field's schema and not built in this version."""


class NonFiniteError(UserError):
    """A step whose loss or gradients are not finite; the weights were not touched."""
