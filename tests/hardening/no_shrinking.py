"""A plugin of pytest for mutants: a failing case is enough, hypothesis need not make it small."""

from hypothesis import Phase, settings

settings.register_profile("no shrinking", phases=[Phase.explicit, Phase.generate])
settings.load_profile("no shrinking")
