"""The native CPU backend: the ops of `kernels/ops.py` in C++, bit for bit, without torch."""
