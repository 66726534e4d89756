"""The progress bar or lines of a training."""

from __future__ import annotations

import math
import shutil
import sys
from collections.abc import Mapping
from typing import TextIO

from bahdanau_fast.seq2seq.model.settings import METRICS, History

__all__ = ["Progress", "described", "plain"]


def plain(loss: float) -> str:
    """A loss without an exponent: three decimals, and more where it is near zero.

    >>> plain(4.1239), plain(0.0312), plain(0.000123), plain(0.0)
    ('4.124', '0.031', '0.00012', '0.000')
    """
    digits = 3 if loss == 0 else max(3, 1 - math.floor(math.log10(abs(loss))))
    return f"{loss:.{digits}f}"


def described(validation: Mapping[str, float]) -> str:
    """Metrics of the validation set as text.

    >>> described({"epoch": 2, "loss": 2.1712, "bleu": 22.084, "chrf": 19.75})
    'loss 2.171, BLEU 22.08, chrF 19.75'
    """
    return ", ".join(
        f"{written} {plain(validation[name]) if name == 'loss' else f'{validation[name]:.2f}'}"
        for name, written in METRICS.items()
        if name in validation  # early checkpoints have no chrF
    )


class Progress:
    """A tqdm bar on a terminal; otherwise (a log, or no tqdm) one line per epoch.

    Args:
        steps: of the whole training.
        epochs: of the whole training.
        history: losses and tokens/s; that of a resumed training already has steps.
        enabled: False shows nothing.
        file: where lines go; the standard output unless given.
    """

    def __init__(
        self,
        steps: int,
        epochs: int,
        history: History,
        *,
        enabled: bool = True,
        file: TextIO | None = None,
    ) -> None:
        self.steps, self.epochs, self.history, self.enabled = steps, epochs, history, enabled
        self.file = file
        self.bar = None
        if enabled and sys.stderr.isatty():
            try:
                from tqdm import tqdm
            except ImportError:
                return
            # A recorded terminal may report zero columns or rows, and tqdm would draw nothing.
            columns = min(100, shutil.get_terminal_size().columns or 80)
            self.bar = tqdm(
                total=steps,
                initial=len(history.losses),
                unit="step",
                desc="training",
                ncols=columns,
                nrows=24,
            )

    def update(self, epoch: int) -> None:
        """Count one more step.

        Args:
            epoch: of the step, from 0.
        """
        done = len(self.history.losses)
        if self.bar is not None:
            if done % 5 == 0 or done == self.steps:
                self.bar.set_postfix_str(self._figures(20), refresh=False)
            self.bar.update()
        elif done == self.steps * (epoch + 1) // self.epochs:
            figures = self._figures(self.steps // self.epochs)
            self.say(f"epoch {epoch + 1}/{self.epochs}  {figures}")

    def say(self, line: str) -> None:
        """Print a line, above the bar if there is one."""
        if self.bar is not None:
            self.bar.write(line, file=self.file or sys.stdout)
        elif self.enabled:
            print(line, file=self.file or sys.stdout, flush=True)

    def _figures(self, steps: int) -> str:
        """Means over the last ``steps`` steps."""
        recent, seconds = self.history.losses[-steps:], self.history.seconds[-steps:]
        speed = sum(self.history.tokens[-steps:]) / sum(seconds)
        return f"loss {plain(sum(recent) / len(recent))}  {speed:,.0f} tokens/s"

    def close(self) -> None:
        """Close the bar."""
        if self.bar is not None:
            self.bar.close()
