"""The GPU report's stages, and what their rows compute."""
