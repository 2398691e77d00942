"""What the kernels share: chip facts, ahead-of-time compilation, test helpers."""
