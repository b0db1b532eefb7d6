"""Ready adapters for `parity judge --implementation NAME`, one a module, each named `adapter`."""
