"""The CUDA codec: Triton kernels that work on many tensors per launch, and their tables."""
