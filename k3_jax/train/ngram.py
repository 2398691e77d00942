"""Bigram, trigram and 4-gram models of the training tokens: the scores that a trained model has to beat.

Interpolated Witten-Bell smoothing (Witten and Bell, 1991), from the uniform distribution upwards:

    p_n(w | h) = (c(h w) + d(h) p_{n-1}(w | h')) / (c(h) + d(h)),      p_0(w) = 1 / V

with c the counts in the training documents, d(h) the number of different tokens seen after h, and h' = h without its
oldest token; an unseen h leaves p_{n-1}. Contexts never cross a document. An n-gram is one integer in base V whose
lowest digit is its last token, so all work is sorting and searching: seconds for 10 MB.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Integer

from k3_jax.config import ConfigError
from k3_jax.train.corpus import Corpus
from k3_jax.train.packing import Batch

NAMES = {1: "unigram", 2: "bigram", 3: "trigram"}


class Table(NamedTuple):
    """Counts of one order: sorted n-grams and sorted contexts; `distinct` counts the successors of a context."""

    grams: Integer[np.ndarray, "G"]
    counts: Integer[np.ndarray, "G"]
    contexts: Integer[np.ndarray, "H"]
    totals: Integer[np.ndarray, "H"]
    distinct: Integer[np.ndarray, "H"]


@dataclass(frozen=True, eq=False)
class NGram:
    """Tables of the orders 1, 2, ... over a vocabulary of `vocab_size`."""

    vocab_size: int
    tables: tuple[Table, ...]

    def probabilities(
        self, tokens: Integer[np.ndarray, "N"], age: Integer[np.ndarray, "N"], targets: Integer[np.ndarray, "M"]
    ) -> Float[np.ndarray, "orders M"]:
        """p_n(tokens[i] | the n-1 tokens before) for i in `targets` and each order n.

        `age[i]` is the number of tokens before i that may serve as its context; where it is short of n - 1, p_n is the
        probability under the longest context there is.
        """
        keys = _Keys(tokens, self.vocab_size)
        lower, rows = np.full(len(targets), 1 / self.vocab_size), []
        for order, table in enumerate(self.tables, start=1):
            query = keys.next()[targets]
            count = _look_up(table.grams, query, table.counts)
            context = query // self.vocab_size
            usable = age[targets] >= order - 1
            total = np.where(usable, _look_up(table.contexts, context, table.totals), 0)
            distinct = _look_up(table.contexts, context, table.distinct)
            mixed = (count + distinct * lower) / np.maximum(total + distinct, 1)
            lower = np.where(total > 0, mixed, lower)
            rows.append(lower)
        return np.stack(rows)


def fit(corpus: Corpus, vocab_size: int, max_order: int = 4) -> NGram:
    """Counts the n-grams of all documents, up to `max_order` tokens long."""
    if vocab_size**max_order >= 2**63:
        limit = int(2 ** (63 / max_order)) - 1
        raise ConfigError(f"vocab_size = {vocab_size}: expected at most {limit} for n-grams of {max_order} tokens")
    starts = np.zeros(len(corpus.tokens), bool)
    starts[corpus.bounds[:-1]] = True
    age = _age(starts)
    keys = _Keys(corpus.tokens, vocab_size)
    return NGram(vocab_size, tuple(_count(keys.next()[age >= n], vocab_size) for n in range(max_order)))


def nats_per_token(model: NGram, batches: Iterable[Batch]) -> dict[str, float]:
    """Mean of -log p over exactly the targets that `loss_mask` selects: {"bigram": ..., "trigram": ..., "4-gram": ...}.

    The context is what a network sees there: earlier tokens of the same segment of the same row.
    """
    total, count = np.zeros(len(model.tables)), 0
    for batch in batches:
        tokens, segment_ids = batch.tokens.reshape(-1), batch.segment_ids
        starts = np.ones(segment_ids.shape, bool)
        starts[:, 1:] = segment_ids[:, 1:] != segment_ids[:, :-1]
        targets = np.flatnonzero(batch.loss_mask) + 1
        total -= np.log(model.probabilities(tokens, _age(starts.reshape(-1)), targets)).sum(axis=1)
        count += len(targets)
    if count == 0:
        raise ValueError("batches hold no target")
    means = enumerate(total / count, start=1)
    return {NAMES.get(order, f"{order}-gram"): float(mean) for order, mean in means if order > 1}


class _Keys:
    """The integers of the n-grams that end at each token, for n = 1, 2, ... in turn."""

    def __init__(self, tokens: Integer[np.ndarray, "N"], vocab_size: int):
        self.tokens, self.vocab_size, self.order = tokens.astype(np.int64), vocab_size, 0
        self.keys = np.zeros_like(self.tokens)

    def next(self) -> Integer[np.ndarray, "N"]:
        """Digits beyond the start of the array are absent; the caller's age test drops those n-grams."""
        shift, self.keys = self.order, self.keys.copy()
        self.keys[shift:] += self.tokens[: len(self.tokens) - shift] * self.vocab_size**shift
        self.order += 1
        return self.keys


def _count(keys: Integer[np.ndarray, "M"], vocab_size: int) -> Table:
    grams, counts = np.unique(keys, return_counts=True)
    context = grams // vocab_size
    first = np.flatnonzero(np.diff(context, prepend=-1))
    totals = np.add.reduceat(counts, first) if len(first) else counts
    return Table(grams, counts, context[first], totals, np.diff(first, append=len(grams)))


def _look_up(
    sorted_keys: Integer[np.ndarray, "G"], query: Integer[np.ndarray, "M"], values: Integer[np.ndarray, "G"]
) -> Integer[np.ndarray, "M"]:
    """values[i] where sorted_keys[i] is the query, 0 where none is."""
    if len(sorted_keys) == 0:
        return np.zeros_like(query)
    place = np.minimum(np.searchsorted(sorted_keys, query), len(sorted_keys) - 1)
    return np.where(sorted_keys[place] == query, values[place], 0)


def _age(starts: Bool[np.ndarray, "N"]) -> Integer[np.ndarray, "N"]:
    """Tokens since the last start, which has age 0."""
    index = np.arange(len(starts))
    return index - np.maximum.accumulate(np.where(starts, index, 0))
