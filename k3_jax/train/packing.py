"""Rows of fixed length cut from the documents of a corpus laid end to end.

A row holds pieces of one or more documents, told apart by `segment_ids`; attention, KDA state and convolutions restart
where these change, so nothing crosses a document. Rows overlap by one token: the last token of a row is only a target
there and the first input of the next row. Thus every token but a document's first is a target exactly once an epoch.
Only the last row of an epoch is padded (segment -1).
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from jaxtyping import Integer

from k3_jax.train.corpus import Corpus


class Batch(NamedTuple):
    """Rows of tokens. Position t predicts `tokens[t + 1]` where `loss_mask[t]`, which never leaves a document or row.

    Shapes: `tokens` and `segment_ids` int32 [B, T], `loss_mask` bool [B, T]; a single row has no B.
    """

    tokens: np.ndarray
    segment_ids: np.ndarray
    loss_mask: np.ndarray


def num_rows(corpus: Corpus, length: int) -> int:
    """Rows of `length` tokens in one epoch; the same for every order of the documents."""
    return -(-(int(corpus.bounds[-1]) - 1) // (length - 1))


def shuffled(count: int, *key: int) -> Integer[np.ndarray, "count"]:
    """A permutation of range(count) that depends on the non-negative integers `key` only.

    It sorts raw PCG64 words, because numpy keeps those, unlike `Generator.permutation`, equal across its releases.
    """
    words = np.random.PCG64(np.random.SeedSequence(key)).random_raw(count)
    return np.argsort(words, kind="stable")


@dataclass(frozen=True, eq=False)
class Stream:
    """The documents of `corpus` laid end to end in `order`."""

    corpus: Corpus
    order: Integer[np.ndarray, "D"]

    @functools.cached_property
    def starts(self) -> Integer[np.ndarray, "bounds"]:
        """Where each document starts in the stream."""
        return np.concatenate([[0], np.cumsum(np.diff(self.corpus.bounds)[self.order])])

    def row(self, index: int, length: int) -> Batch:
        """Row `index` of `length` tokens; fields have shape [length]."""
        begin = index * (length - 1)
        position = np.arange(begin, min(begin + length, self.starts[-1]))
        document = np.searchsorted(self.starts, position, side="right") - 1
        source = self.corpus.bounds[self.order[document]] + position - self.starts[document]
        row = padding(length)
        row.tokens[: len(source)] = self.corpus.tokens[source]
        row.segment_ids[: len(source)] = document - document[0]
        row.loss_mask[: len(source) - 1] = (document[1:] == document[:-1]) & self.corpus.trained[source[1:]]
        return row


def padding(length: int) -> Batch:
    """A row without tokens."""
    return Batch(np.zeros(length, np.int32), np.full(length, -1, np.int32), np.zeros(length, bool))


def stack(rows: Sequence[Batch]) -> Batch:
    """[T] rows -> [B, T]."""
    return Batch(*(np.stack(field) for field in zip(*rows, strict=True)))
