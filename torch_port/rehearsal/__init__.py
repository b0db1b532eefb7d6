"""Rehearsing a run on a virtual device: what it would allocate, dispatch and send, without one."""
