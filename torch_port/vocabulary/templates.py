"""Chat templates, as counting uses them: those that prepare the training data. No torch."""

from torch_port.data.templates import CHATML, ChatTemplate, Encode, encoder, resolve_template

__all__ = ["CHATML", "ChatTemplate", "Encode", "encoder", "resolve_template"]
