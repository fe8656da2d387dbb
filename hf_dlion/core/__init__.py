"""The arithmetic of a step, on tensors of this rank alone."""
