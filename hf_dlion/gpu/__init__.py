"""All that is Triton: kernels, their tables, and which messages they take."""
