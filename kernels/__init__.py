"""Arithmetic: Triton for GPUs, Numba for CPUs, and a plain torch twin of each as the reference.

`ops_for(device)` in `niwaki.kernels.ops` picks the implementation that models compute with.
"""
