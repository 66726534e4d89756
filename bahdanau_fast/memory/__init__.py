"""Projected keys, cached between calls. Nothing here decides how they are computed."""

from bahdanau_fast.memory.projected_keys import Maker, Memory, ProjectedKeys, project

__all__ = ["Maker", "Memory", "ProjectedKeys", "project"]
