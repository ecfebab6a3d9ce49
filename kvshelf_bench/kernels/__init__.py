"""How near the kernels come to what the device can do."""
