"""Checkpoints in the released layout, the configuration that comes with them, and tokenizers."""
