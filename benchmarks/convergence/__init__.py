"""A convergence study that anyone can rerun."""
