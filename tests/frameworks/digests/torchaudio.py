"""Stands for torchaudio, whose wheels need the libraries of CUDA; no recipe has sound."""
