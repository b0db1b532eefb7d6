"""`torch-port doctor`: what a machine has for training on Ascend cards, line by line.

`checks` holds a line, `environment` looks at versions, variables and cards, `ring` at HCCL,
`kernels` at each fused kernel beside its portable twin, `step` at one training step beside the
vector in `vector/`; `commands` is the command, which runs them all.
"""
