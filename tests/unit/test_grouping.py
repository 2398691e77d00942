"""Chunks of layers for a pipeline: whole blocks, equal cost, one pattern of slots for all."""

import itertools

import numpy as np
import pytest

from k3_jax.config import ConfigError
from k3_jax.nn.block import Kind, kind
from k3_jax.nn.grouping import Depth, Group, cut, shortest_common
from tests.models import tiny_config
from tests.unit.test_depth import deep_config

KDA_DENSE, KDA_MOE, MLA_MOE = Kind(False, False), Kind(False, True), Kind(True, True)


@pytest.mark.parametrize(("pipe", "interleave"), [(8, 1), (4, 2), (2, 4)])
def test_eight_chunks_of_k3(pipe, interleave):
    """One block each, on one pattern: the first lacks a KDA layer, the last has the MLA alone in its third group."""
    depth = Depth(deep_config(93), pipe, interleave)
    assert [len(chunk) for chunk in depth.chunks] == [12] * 7 + [9]
    assert depth.groups == (Group(0, 1, ((KDA_DENSE, 1),)), Group(1, 3, ((KDA_MOE, 3), (MLA_MOE, 1))))
    (dense,), (kda, mla) = depth.numbers
    assert dense.shape == (pipe, interleave, 1, 1)
    assert kda.shape == (pipe, interleave, 3, 3)
    assert kda[0, 0].tolist() == [[1, 2, -1], [4, 5, 6], [8, 9, 10]]
    assert kda[-1, -1].tolist() == [[84, 85, 86], [88, 89, 90], [-1, -1, -1]]
    assert mla[-1, -1].tolist() == [[87], [91], [92]]
    assert depth.first_rows() == tuple(range(8))


def test_every_layer_has_one_place_of_its_kind():
    rng = np.random.default_rng(0)
    for _ in range(100):
        layers, block = int(rng.integers(4, 30)), int(rng.integers(1, 5))
        mla = tuple(np.flatnonzero(rng.random(layers) < 0.3).tolist())
        dense = int(rng.integers(0, 3))
        config = tiny_config(num_layers=layers, mla_layers=mla, first_dense_layers=dense, attn_res_block=block)
        pipe = int(rng.integers(2, 5))
        interleave = max(1, int(rng.integers(1, 3)))
        if pipe * interleave > config.num_attn_res_blocks:
            continue
        depth = Depth(config, pipe, interleave)
        assert [i for chunk in depth.chunks for i in chunk] == list(range(layers))
        assert all(chunk.start % block == 0 for chunk in depth.chunks)
        places = []
        for group, runs in zip(depth.groups, depth.numbers, strict=True):
            for (k, _), numbers in zip(group.runs, runs, strict=True):
                held = numbers[numbers >= 0]
                assert all(kind(config, int(layer)) == k for layer in held)
                places += held.tolist()
        assert sorted(places) == list(range(layers))
        for p, v in itertools.product(range(pipe), range(interleave)):
            order = [x for runs in depth.numbers for x in np.concatenate([n[p, v] for n in runs], 1).reshape(-1)]
            assert [x for x in order if x >= 0] == list(depth.chunks[v * pipe + p])


def test_more_chunks_than_blocks_are_refused():
    with pytest.raises(ConfigError, match="4 x 3: expected at most 8 chunks"):
        Depth(deep_config(93), 4, 3)


def test_cut_is_the_best_of_all():
    rng = np.random.default_rng(1)
    for _ in range(30):
        costs = rng.integers(1, 20, int(rng.integers(3, 9))).tolist()
        parts = int(rng.integers(1, len(costs) + 1))
        ends = ([*inner, len(costs)] for inner in itertools.combinations(range(1, len(costs)), parts - 1))
        best = min(max(sum(costs[a:b]) for a, b in zip([0, *e], e, strict=False)) for e in ends)
        ranges = cut(costs, parts)
        assert [i for r in ranges for i in r] == list(range(len(costs)))
        assert len(ranges) == parts
        assert max(sum(costs[i] for i in r) for r in ranges) == best


def test_head_counts_as_work():
    """Equal blocks and a large vocabulary: the last rank gets fewer of them."""
    config = tiny_config(num_layers=6, mla_layers=(), first_dense_layers=6, moe=None, attn_res_block=1)
    assert [len(chunk) for chunk in Depth(config, 2).chunks] == [3, 3]
    large = tiny_config(num_layers=6, mla_layers=(), first_dense_layers=6, moe=None, attn_res_block=1, vocab_size=1000)
    assert [len(chunk) for chunk in Depth(large, 2).chunks] == [5, 1]


def test_shortest_common_sequence():
    assert shortest_common("", "ab") == ["a", "b"]
    assert len(shortest_common("dkkmkkkm", "kkkmkkkm")) == 9
    rng = np.random.default_rng(2)
    for _ in range(50):
        a, b = (rng.choice(list("km"), int(rng.integers(0, 7))).tolist() for _ in range(2))
        merged = shortest_common(a, b)
        for part in (a, b):
            rest = iter(merged)
            assert all(x in rest for x in part)
        longest = max(
            (n for n in range(min(len(a), len(b)) + 1) for c in itertools.combinations(a, n) if _holds(b, c)),
        )
        assert len(merged) == len(a) + len(b) - longest


def _holds(sequence, part) -> bool:
    rest = iter(sequence)
    return all(x in rest for x in part)
