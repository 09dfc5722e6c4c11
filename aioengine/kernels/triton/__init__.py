"""Kernels for NVIDIA GPUs, in Triton. All but ``launcher`` import it."""
