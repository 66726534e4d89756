"""The kinds of modules that :func:`bahdanau_fast.fuse` knows, in the order they are tried."""

from bahdanau_fast.fuse.families import (
    espnet,
    pointers,
    speechbrain,
    synthesis,
    three_layers,
    translation,
)
from bahdanau_fast.fuse.families.family import Family

__all__ = ["FAMILIES", "Family"]

FAMILIES: tuple[type[Family], ...] = (
    speechbrain.Location,
    speechbrain.Content,
    espnet.AttLoc,
    espnet.AttCov,
    espnet.AttAdd,
    translation.JoeyNMT,
    translation.OpenNMT,
    translation.AllenNLP,
    translation.Gnmt,
    pointers.Pointer,
    synthesis.Tacotron2,
    synthesis.Coqui,
    three_layers.Course,
    three_layers.TwoInputs,
)
