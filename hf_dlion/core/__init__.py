"""The rewritten core, which moves up to `hf_dlion` once it is complete."""
