"""The new core, beside the old one until it takes its place."""
