"""AdamW on float32 masters of bf16 parameters, under given gradients (sheet §14).

No draft runs: the same gradients go through the port's optimizer and optax, so that masters,
moments, rates and clips are compared where a whole training would compare its rounding.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from parity.cases import Array, Case
from parity.checks.base import Measured
from parity.compare import relative_error
from parity.names import to_flax, to_torch
from parity.recipes import OPTIMIZER
from parity.sides import setup_jax, to_numpy
from parity.tolerances import EXACT, MASTERS

NAME = "training"
STEPS = 50
_SHAPES = {
    "fc.weight": (6, 5),
    "norm.weight": (6,),
    "layers.0.self_attn.q_norm.weight": (4,),
    "markov_head.markov_w1.weight": (9, 3),
    "confidence_head.proj.bias": (1,),
}


def masters_case(seed: int) -> Case:
    """Draw parameters that bf16 holds, and 50 steps' gradients, most of which a clip cuts."""
    random = np.random.default_rng([17, seed])
    tensors: dict[str, Array] = {}
    for name, shape in _SHAPES.items():
        weight = random.normal(size=shape).astype(np.float32)
        # 8 bits of mantissa: what a bf16 parameter starts from.
        tensors[f"weights/{name}"] = (weight.view(np.uint32) & 0xFFFF0000).view(np.float32)
        for step in range(STEPS):
            size = random.choice([0.01, 0.3, 1.0])
            gradient = random.normal(size=shape) * size
            tensors[f"gradients/{step}/{name}"] = gradient.astype(np.float32)
    optimizer = OPTIMIZER | {"total_steps": STEPS, "peak_rate": 1e-3}
    return Case("masters", Path("masters"), {}, {}, {}, tensors, {"masters": optimizer})


def compare_masters(case: Case) -> list[Measured]:
    """Compare masters and moments after every step; a parameter is its master rounded to bf16."""
    result = []
    pairs = zip(_port_masters(case), _spec_masters(case), strict=True)
    for step, (port, spec) in enumerate(pairs, start=1):
        result.append(Measured(NAME, f"step {step}: rounded masters", port[3], EXACT))
        for what, got, expected in zip(("first", "second"), port[1:3], spec[1:3], strict=True):
            result += [
                Measured(
                    NAME,
                    f"step {step}: {what} moment of {name}",
                    relative_error(got[name] / _size(value), value / _size(value)),
                    MASTERS["moments"],
                )
                for name, value in expected.items()
            ]
        result += [
            Measured(
                NAME,
                f"step {step}: master of {name}",
                relative_error(port[0][name], value),
                MASTERS["masters"],
            )
            for name, value in spec[0].items()
        ]
    return result


def _size(value: Array) -> float:
    return max(float(np.abs(value).max()), 1e-30)


Tensors = dict[str, Array]


def _port_masters(case: Case) -> Iterator[tuple[Tensors, Tensors, Tensors, float]]:
    import torch

    from torch_port.training.optimizer import MasterAdamW, OptimizerConfig, rate_at

    numbers = dict(case.extra["masters"])
    betas = (numbers.pop("beta1"), numbers.pop("beta2"))
    config = OptimizerConfig(betas=betas, **numbers)
    named = {
        name: torch.nn.Parameter(torch.from_numpy(value).to(torch.bfloat16))
        for name, value in case.group("weights").items()
    }
    optimizer = MasterAdamW(named.items(), config)
    for step in range(STEPS):
        for name, gradient in case.group(f"gradients/{step}").items():
            named[name].grad_dtype = torch.float32
            named[name].grad = torch.from_numpy(gradient.copy())
        optimizer.apply(rate_at(step + 1, config), optimizer.gradient_norm())
        masters = dict(zip(optimizer.names, optimizer.masters, strict=True))
        moments = optimizer.moments()
        same = all(torch.equal(p, masters[n].to(torch.bfloat16)) for n, p in named.items())
        yield (
            {name: to_numpy(value).copy() for name, value in masters.items()},
            {name: to_numpy(first).copy() for name, (first, _) in moments.items()},
            {name: to_numpy(second).copy() for name, (_, second) in moments.items()},
            0.0 if same else float("inf"),
        )


def _spec_masters(case: Case) -> Iterator[tuple[Tensors, Tensors, Tensors]]:
    setup_jax()
    import jax
    import jax.numpy as jnp
    import optax

    from jaxdraft import training

    numbers = dict(case.extra["masters"])
    numbers["epsilon"] = numbers.pop("eps")
    config = training.OptimizerConfig(**numbers)
    params = jax.tree.map(jnp.asarray, to_flax(case.group("weights")))
    transformation = training.make_optimizer(config)
    state = transformation.init(params)
    update = jax.jit(transformation.update)
    for step in range(STEPS):
        grads = jax.tree.map(jnp.asarray, to_flax(case.group(f"gradients/{step}")))
        with jax.numpy_dtype_promotion("standard"):  # optax mixes its own float32 scalars in
            direction, state = update(grads, state, params)
            rate = training.rate(config, step + 1)
            params = jax.tree.map(lambda p, d, r=rate: p - r.astype(p.dtype) * d, params, direction)
        trees = params, optax.tree.get(state, "mu"), optax.tree.get(state, "nu")
        masters, first, second = (to_torch(tree) for tree in trees)
        yield masters, first, second
