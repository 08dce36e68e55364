"""Arithmetic: Triton for GPUs, Numba for CPUs, and a plain torch twin of each as the reference."""
