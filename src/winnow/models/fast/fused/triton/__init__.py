"""The passes around a layer's matrix products as Triton kernels, for GPUs."""
