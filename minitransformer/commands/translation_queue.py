"""The queue of a server: lines that wait, and the thread that translates them."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from minitransformer.commands.attention_maps import attention_maps
from minitransformer.settings.decoding_config import TranslationConfig
from minitransformer.translation.translator import Translator


class Line(NamedTuple):
    """A line, how its translation begins, and its size.

    Units: size tokens times the beam
    """

    text: str
    prefix: str
    size: int


@dataclass(eq=False)
class Job:
    """Lines that a model translates, or whose attention it shows."""

    translator: Translator
    config: TranslationConfig
    lines: deque[Line]
    shows_attention: bool = False
    done: list[Any] = field(default_factory=list)
    result: Future[list[Any]] = field(default_factory=Future)

    @property
    def size(self) -> int:
        """The size of the lines that wait. Units: tokens times the beam"""
        return sum(line.size for line in self.lines.copy())

    @property
    def kind(self) -> tuple[Translator, TranslationConfig, bool]:
        """What jobs have in common that are computed together."""
        return self.translator, self.config, self.shows_attention


class TranslationQueue:
    """Jobs that wait for one thread, which computes a batch of lines after another.

    A batch has lines of one or several jobs of a kind. The models take turns, so a job
    waits for one batch of another model at most.
    """

    def __init__(self) -> None:
        self.waiting = deque[Job]()
        self._served: Translator | None = None  # the model of the last batch
        self._worker = ThreadPoolExecutor(1)  # whose GPU, if any, is the models'

    def size(self) -> int:
        """Return the size of all jobs that wait. Units: tokens times the beam"""
        return sum(job.size for job in self.waiting.copy())

    def submit(self, job: Job) -> Future[list[Any]]:
        """Add a job, and return the future of its results.

        The result of a line is a list of hypotheses, or its attention as JSON.
        """
        self.waiting.append(job)
        self._worker.submit(self._next)
        return job.result

    def close(self) -> None:
        """Drop the jobs that wait, and wait for the batch that is computed.

        A thread in C++ code cannot be ended safely.
        """
        self._worker.shutdown(cancel_futures=True)

    def _next(self) -> None:
        """Compute a batch of the first jobs of a kind."""
        waiting = [self.waiting.popleft() for _ in range(len(self.waiting))]
        jobs = [job for job in waiting if job.lines]  # else one of its lines was wrong
        if not jobs:  # earlier calls did them
            return
        # Choose the first job of another model than that of the last batch, if any.
        others = (job for job in jobs if job.translator is not self._served)
        first = next(others, jobs[0])
        self._served = first.translator
        alike = [job for job in jobs if job.kind == first.kind]
        # Fill a batch with lines of this job, and of those of its kind.
        room = first.config.decode_tokens
        batch = list[tuple[Job, Line]]()
        for job in alike:
            while job.lines and room > 0:
                batch.append((job, job.lines.popleft()))
                room -= batch[-1][1].size
        # What is left waits again, the job that was begun behind the others.
        left = [job for job in alike if job.lines]
        self.waiting.extend(job for job in jobs if job.kind != first.kind)
        self.waiting.extend([*left[1:], *left[:1]])
        self._compute(batch)
        if self.waiting:
            self._worker.submit(self._next)

    def _compute(self, batch: Sequence[tuple[Job, Line]]) -> None:
        """Add the results of lines to their jobs, or set the error of each job."""
        jobs = [*dict.fromkeys(job for job, _ in batch)]
        try:
            results = self._results(jobs[0], [line for _, line in batch])
        except Exception as error:
            if len(jobs) > 1:  # one of them is the cause
                for job in jobs:
                    self._compute([pair for pair in batch if pair[0] is job])
                return
            jobs[0].lines.clear()
            jobs[0].result.set_exception(error)
            return
        for (job, _), result in zip(batch, results, strict=True):
            job.done.append(result)
        for job in jobs:
            if not job.lines:
                job.result.set_result(job.done)

    def _results(self, job: Job, lines: Sequence[Line]) -> list[Any]:
        """Return the result of each line, in order, for jobs of this kind."""
        job.translator.use_device()
        texts = [line.text for line in lines]
        if job.shows_attention:
            return [
                attention_maps(job.translator, text, job.config).to_json()
                for text in texts
            ]
        # Errors count the lines of a job that is alone in its batch.
        return job.translator.hypotheses(
            texts,
            job.config,
            first_line=len(job.done) + 1,
            prefixes=[line.prefix for line in lines],
        )
