"""The GPU report's stages, and the processes that they run in."""
