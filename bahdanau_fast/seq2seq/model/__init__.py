"""Encoder, decoders, the settings that describe a model, and its checkpoints."""
