"""The queue of a server: lines that wait, and the thread that translates them."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from minitransformer.commands.attention_maps import attention_maps
from minitransformer.settings.decoding_config import TranslationConfig
from minitransformer.translation.translator import Translator


@dataclass
class Job:
    """Lines with a prefix for each translation, or the lines whose attention is shown.

    Units: size tokens times the beam
    """

    lines: Sequence[str]
    config: TranslationConfig
    prefixes: Sequence[str] = ()
    shows_attention: bool = False
    size: int = 0
    result: Future[Any] = field(default_factory=Future)

    @property
    def kind(self) -> tuple[TranslationConfig, bool]:
        """What jobs have in common that are computed together."""
        return self.config, self.shows_attention


class TranslationQueue:
    """Jobs that wait for one thread; it computes those of one kind together."""

    def __init__(self, translator: Translator) -> None:
        self.translator = translator
        self.waiting = deque[Job]()
        self._worker = ThreadPoolExecutor(1)  # whose GPU, if any, is the model's

    def size(self) -> int:
        """Return the size of all jobs that wait. Units: tokens times the beam"""
        return sum(job.size for job in self.waiting.copy())

    def submit(self, job: Job) -> Future[Any]:
        """Add a job, and return the future of its result.

        The result is a list of hypotheses for each line, or the attention as JSON.
        """
        self.waiting.append(job)
        self._worker.submit(self._next)
        return job.result

    def close(self) -> None:
        """Drop the jobs that wait, and wait for the one that is computed.

        A thread in C++ code cannot be ended safely.
        """
        self._worker.shutdown(cancel_futures=True)

    def _next(self) -> None:
        """Do the first job that waits, and all others of its kind."""
        waiting = [self.waiting.popleft() for _ in range(len(self.waiting))]
        if waiting:  # else an earlier call did them
            kind = waiting[0].kind
            self.waiting.extend(job for job in waiting if job.kind != kind)
            self._do([job for job in waiting if job.kind == kind])

    def _do(self, jobs: Sequence[Job]) -> None:
        """Set the results of jobs of one kind, or the error of each."""
        try:
            results = self._results(jobs)
        except Exception as error:
            if len(jobs) == 1:
                jobs[0].result.set_exception(error)
            else:  # one of them is the cause
                for job in jobs:
                    self._do([job])
            return
        for job, result in zip(jobs, results, strict=True):
            job.result.set_result(result)

    def _results(self, jobs: Sequence[Job]) -> list[Any]:
        self.translator.use_device()
        config = jobs[0].config
        lines = [line for job in jobs for line in job.lines]
        if jobs[0].shows_attention:
            return [attention_maps(self.translator, x, config).to_json() for x in lines]
        # Translate the lines of all jobs together, and give each job its part.
        prefixes = [prefix for job in jobs for prefix in job.prefixes]
        translations = iter(self.translator.hypotheses(lines, config, 1, prefixes))
        return [[next(translations) for _ in job.lines] for job in jobs]
