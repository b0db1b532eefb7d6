"""The states of a rank's random generators, as JSON values."""

from __future__ import annotations

import base64
from collections.abc import Mapping

import torch


def random_states(device: torch.device) -> dict[str, str]:
    """Return the states of torch's generators of the host and of a device, in base64, by kind."""
    states = {"cpu": torch.get_rng_state()}
    if device.type != "cpu":
        states[device.type] = torch.get_device_module(device).get_rng_state(device)
    return {
        kind: base64.b64encode(bytes(state.tolist())).decode() for kind, state in states.items()
    }


def restore_random_states(states: Mapping[str, str], device: torch.device) -> None:
    """Put back what `random_states` returned; a kind of device that this rank lacks is left out."""
    for kind, text in states.items():
        state = torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
        if kind == "cpu":
            torch.set_rng_state(state)
        elif kind == device.type:
            torch.get_device_module(device).set_rng_state(state, device)
