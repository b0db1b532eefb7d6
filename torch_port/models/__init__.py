"""The draft models: device-free and parallelism-free torch modules."""
