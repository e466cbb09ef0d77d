"""The state with which a run continues, besides parameters and Adam's moments."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

from minitransformer.settings.config import TrainingConfig
from minitransformer.settings.decoding_config import DecodingConfig
from minitransformer.settings.options import from_dict


@dataclass(frozen=True)
class Window:
    """Sums over the updates since the last report: loss in nats, tokens, and seconds.

    Skipped updates have no loss and no target tokens.
    """

    loss: float = 0.0
    source: float = 0.0
    target: float = 0.0
    seconds: float = 0.0


@dataclass(frozen=True)
class RunState:
    """The state of a run after `step` updates, as its checkpoints hold it.

    `text` has a digest of each split, and `languages` the endings of the names of the
    training text. `origin` is the CRC-32 of the parameters before the first update, 0
    if unknown. The next batch is number `position` of `epoch`; a
    validation of this step is pending if the state was saved before it. `best_loss` and
    `best_bleu` belong to the best model so far, after `best_step` updates; a BLEU that
    was not measured is -1.
    `loss_scale` is fp16's factor with its number of finite steps. `workers` is how many
    processes of all ranks divide a batch, 0 if unknown. `median_sentences` is the
    median number of sentences in a line of the training text. `log_prob_quantiles` are
    the `confidence.quantiles` of the last validation. `decoding` are the default
    settings of translations by the model.

    The names of all fields are part of the checkpoint format.
    """

    text: dict[str, str] = field(default_factory=dict)
    languages: tuple[str, ...] = ()
    origin: int = 0
    step: int = 0
    epoch: int = 0
    position: int = 0
    seconds: float = 0.0
    best_loss: float = math.inf
    best_bleu: float = -1.0
    best_step: int = 0
    validations_since_best: int = 0
    pending_validations: int = 0
    skipped: int = 0
    learning_rate: float = 0.0
    gradient_norm: float = math.nan
    loss_scale: tuple[float, int] | None = None
    workers: int = 0
    median_sentences: int = 1
    log_prob_quantiles: tuple[float, ...] = ()
    decoding: DecodingConfig = field(default_factory=DecodingConfig)
    window: Window = field(default_factory=Window)

    @classmethod
    def from_json(cls, stored: dict[str, Any]) -> RunState:
        """Read the JSON object of a state. Missing fields have their defaults.

        A null stands for a number that is not finite or for None, as the default does.

        Raises: ValueError or TypeError if it is not the state of a run.
        """
        values = {name: value for name, value in stored.items() if value is not None}
        decoding = {**values.get("decoding", {}), "nbest": 1}
        values["decoding"] = from_dict(DecodingConfig, decoding)
        values["window"] = from_dict(Window, values.get("window", {}))
        for name in {"loss_scale", "log_prob_quantiles", "languages"} & values.keys():
            values[name] = tuple(values[name])
        return from_dict(cls, values)

    def used_up(self, training: TrainingConfig) -> str | None:
        """Return the flag of the limit that ends the run, if one is reached."""
        if self.step >= training.steps:
            return f"--steps {training.steps}"
        if self.seconds >= 60 * (training.minutes or math.inf):
            return f"--minutes {training.minutes:g}"
        if self.validations_since_best >= (training.patience or math.inf):
            return f"--patience {training.patience}"
        return None

    def outlook(self, training: TrainingConfig) -> str:
        """Return how much of the run is done, and the time that is left at this speed.

        Patience may end it sooner.
        """
        # The share of the limit that is reached first.
        minutes = training.minutes or math.inf
        share, limit = max(
            (self.step / training.steps, ""),
            (self.seconds / (60 * minutes), f" of {minutes:g} minutes"),
        )
        left = timedelta(seconds=round(max(self.seconds * (1 / share - 1), 0)))
        done = f"{share:.0%}{limit}, {left} left"
        return f"step {self.step:>6,}/{training.steps:,}  {done}"

    def validated(self, loss: float, bleu: float, best_by: str | None) -> RunState:
        """Return the state after a validation, which may be the best (--best-by)."""
        best = replace(
            self,
            pending_validations=0,
            validations_since_best=0,
            best_loss=loss,
            best_bleu=bleu,
            best_step=self.step,
        )
        if best.best_cost(best_by) < self.best_cost(best_by):
            return best
        since = self.validations_since_best + 1
        return replace(self, pending_validations=0, validations_since_best=since)

    def best_cost(self, best_by: str | None) -> float:
        """Return how bad the best model is: its loss, or the negative of its BLEU."""
        return -self.best_bleu if best_by == "bleu" else self.best_loss


def json_of(value: Any) -> str:
    """Return JSON, which knows no NaN and no infinity: these become null."""
    text = json.dumps(value)
    return json.dumps(json.loads(text, parse_constant=lambda name: None))
