"""Where a training run is: what its checkpoints keep of that, and what its log says."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any

from minitransformer.backend import Array, array_module
from minitransformer.data import Batch, BatchStream, ReadAhead
from minitransformer.precision import LossScale


class Progress:
    """The state of a run, a JSON object, and sums since the last report in it.

    Between two calls of `settle`, what updates found may be scalars on a GPU.
    """

    def __init__(self, state: dict[str, Any], scale: LossScale) -> None:
        self.state, self.scale = state, scale
        self._skipped: int = state["skipped"]

    @staticmethod
    def beginning(text: str) -> dict[str, Any]:
        """The state before the first update. `text`: the training text's digest"""
        return {
            "step": 0,
            "epoch": 0,
            "position": 0,
            "seconds": 0.0,
            "text": text,
            "best_loss": math.inf,
            "validations_since_best": 0,
            "skipped": 0,
            "window": dict.fromkeys(("loss", "source", "target", "seconds"), 0.0),
        }

    def add(
        self,
        batches: Sequence[Batch],
        stream: BatchStream | ReadAhead,
        rate: float,
        loss: Array,
        norm: Array,
        finite: Array,
    ) -> None:
        """Count an update. Shapes: loss, norm, finite scalars, of any library"""
        state, window = self.state, self.state["window"]
        xp = array_module(self.scale.factor)
        state.update(
            step=state["step"] + 1,
            epoch=stream.epoch,
            position=stream.position,
            learning_rate=rate,
            gradient_norm=norm,
            skipped=state["skipped"] + xp.where(finite, 0, 1),
        )
        tokens = sum(batch.target_tokens for batch in batches)
        window["loss"] += xp.where(finite, loss * tokens, 0.0)
        window["left_out"] = window.get("left_out", 0) + xp.where(finite, 0, tokens)
        window["target"] += tokens
        window["source"] += sum(batch.source_tokens for batch in batches)

    def settle(self) -> int:
        """Wait for the device, and turn what it has found into numbers.

        Returns: how many updates were left out since the last time, because their loss
        or gradient was not finite and no smaller loss scale is left to try
        """
        state, window, started = self.state, self.state["window"], time.monotonic()
        window.update((k, float(window[k])) for k in ("loss", "left_out"))
        state["gradient_norm"] = float(state["gradient_norm"])
        state["skipped"] = int(state["skipped"])
        if self.scale.adapts:
            state["loss_scale"] = float(self.scale.factor), int(self.scale.good)
        window["seconds"] += time.monotonic() - started
        lost, self._skipped = state["skipped"] - self._skipped, state["skipped"]
        return lost if not self.scale.adapts or state["loss_scale"][0] < 1 else 0

    @property
    def place(self) -> str:
        """Where the last update was."""
        state = self.state
        return (
            f"step {state['step']:,}, epoch {state['epoch']}, batch {state['position']}"
        )

    def report(self) -> tuple[dict[str, float], str]:
        """Mean loss and speed since the last report, as values and as a line."""
        state, window = self.state, self.state["window"]
        counted = window["target"] - window["left_out"]
        loss = window["loss"] / counted if counted else math.nan
        source, target = (window[s] / window["seconds"] for s in ("source", "target"))
        rate, norm = state["learning_rate"], state["gradient_norm"]
        window.update(dict.fromkeys(window, 0.0))
        values = {
            "epoch": state["epoch"],
            "loss": loss,
            "learning_rate": rate,
            "gradient_norm": norm,
            "source_tokens_per_second": round(source),
            "target_tokens_per_second": round(target),
            "seconds": round(state["seconds"], 3),
        }
        line = (
            f"step {state['step']:>6,}  epoch {state['epoch']:>3}  loss {loss:.4f}  "
            f"lr {rate:.2e}  norm {norm:.2f}  {source:,.0f} source + {target:,.0f} "
            f"target tokens/s  {state['seconds']:,.0f} s"
        )
        if self.scale.adapts:
            scale, skipped = state["loss_scale"][0], state["skipped"]
            values.update(loss_scale=scale, skipped=skipped)
            line += f"  loss scale {scale:,.0f}, {skipped:,} skipped"
        return values, line
