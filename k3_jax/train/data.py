"""Batches for training and evaluation, at a position that is one integer.

Training reads an endless order of samples (packed rows). Epoch e of stage s lays the documents end to end in an order
drawn from (seed, s, e), cuts the rows, and shuffles these too. The position is the number of samples consumed by all
hosts together, so it does not depend on how many hosts there are: the global batch at position p is samples
[p, p + batch_size), host h of n holds its h-th contiguous slice, and after k batches the position is p + k batch_size.

Context-length stages: a position counts rows of the stage's own length. Each stage starts at position 0 of an order of
its own, which (seed, stage) determine; what an unfinished epoch of the stage before had left over is not resumed.
"""

import functools
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import grain
import numpy as np
from jaxtyping import Integer

from k3_jax.config import ConfigError, DataConfig
from k3_jax.train.corpus import Corpus
from k3_jax.train.packing import Batch, Stream, num_rows, padding, shuffled, stack

# Building a row is a gather of a few milliseconds: two threads stay ahead of any step without holding much memory.
_READ = grain.ReadOptions(num_threads=2, prefetch_buffer_size=4)


@dataclass(frozen=True, eq=False)
class Batches:
    """The training batches of host `process_index` of `process_count` (hosts along the batch axis).

    For a later context stage give its number and `data` with the stage's `sequence_length` and `batch_size`.
    """

    corpus: Corpus
    data: DataConfig
    process_index: int = 0
    process_count: int = 1
    stage: int = 0

    def __post_init__(self):
        _local_rows(self.data, self.process_index, self.process_count)
        # Two epochs, because a batch may span their border. A cached method would keep every instance alive.
        object.__setattr__(self, "_order", functools.lru_cache(maxsize=2)(functools.partial(_order, self)))

    @functools.cached_property
    def samples_per_epoch(self) -> int:
        return num_rows(self.corpus, self.data.sequence_length)

    def epoch(self, position: int) -> float:
        """Epochs of this stage done at `position`."""
        return position / self.samples_per_epoch

    def sample(self, index: int) -> Batch:
        """Sample `index` of the endless global order; fields have shape [T]."""
        epoch, place = divmod(index, self.samples_per_epoch)
        stream, rows = self._order(epoch)
        return stream.row(int(rows[place]), self.data.sequence_length)

    def batch(self, position: int) -> Batch:
        """This host's rows [B / n, T] of the global batch at `position`."""
        rows = _local_rows(self.data, self.process_index, self.process_count)
        return stack([self.sample(position + row) for row in rows])

    def from_position(self, position: int) -> Iterator[Batch]:
        """Endless batches from `position` on, built ahead by threads that end when the iterator is closed."""
        steps = grain.MapDataset.range(0, sys.maxsize // self.data.batch_size)
        batches = steps.map(lambda step: self.batch(position + step * self.data.batch_size))
        iterator = iter(batches.to_iter_dataset(_READ))
        try:
            yield from iterator
        finally:
            iterator.close()

    def state(self, position: int) -> dict[str, int | str]:
        """What a checkpoint stores so that `resume` continues with exactly the next sample; JSON types only."""
        return {
            "position": int(position),
            "stage": self.stage,
            "seed": self.data.seed,
            "sequence_length": self.data.sequence_length,
            "fingerprint": self.corpus.fingerprint,
        }

    def resume(self, state: dict[str, Any]) -> int:
        """The position in `state`. Raises ConfigError if the next samples would not be those of the saved run."""
        expected = self.state(state["position"])
        for name, value in expected.items():
            if state[name] != value:
                message = f"checkpoint data.{name} = {state[name]!r}: expected {value!r}; the data or its configuration"
                raise ConfigError(f"{message} changed, so start a new run from the checkpoint's weights instead")
        return expected["position"]


def _order(batches: Batches, epoch: int) -> tuple[Stream, Integer[np.ndarray, "R"]]:
    """The documents' stream of one epoch, and the order of its rows."""
    key = (batches.data.seed, batches.stage, epoch)
    stream = Stream(batches.corpus, shuffled(len(batches.corpus.names), *key, 0))
    return stream, shuffled(batches.samples_per_epoch, *key, 1)


def _local_rows(data: DataConfig, process_index: int, process_count: int) -> range:
    if data.batch_size % process_count:
        raise ConfigError(f"DataConfig.batch_size = {data.batch_size}: expected a multiple of {process_count} hosts")
    local = data.batch_size // process_count
    return range(process_index * local, (process_index + 1) * local)


def iter_eval_batches(
    corpus: Corpus, data: DataConfig, limit: int | None = None, process_index: int = 0, process_count: int = 1
) -> Iterator[Batch]:
    """At most `limit` batches (None: all) of `corpus`, always the same, in the same order; the last one is padded.

    A limit takes rows spread evenly over the documents, so that few batches still represent the whole split.
    """
    stream = Stream(corpus, np.arange(len(corpus.names)))
    total = num_rows(corpus, data.sequence_length)
    count = total if limit is None else min(total, limit * data.batch_size)
    chosen = np.arange(count) * total // count
    local = _local_rows(data, process_index, process_count)
    for first in range(0, count, data.batch_size):
        rows = [stream.row(int(row), data.sequence_length) for row in chosen[first + local.start : first + local.stop]]
        yield stack(rows + [padding(data.sequence_length)] * (len(local) - len(rows)))
