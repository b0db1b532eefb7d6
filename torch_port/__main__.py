"""`python -m torch_port`: the same as the `torch-port` command."""

from torch_port.cli import main

main()
