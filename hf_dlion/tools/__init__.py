"""The command `hf-dlion`: benchmarks, predictions and the study of convergence."""
