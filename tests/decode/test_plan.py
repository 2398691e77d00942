"""The plan of K3 itself on 32 cores: exchanges, bytes in HBM and VMEM, bytes per step; and what is refused."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from k3_jax.config import ConfigError
from k3_jax.recipe import load_recipe
from k3_jax.serve.pack import BLOCKS, decode_config
from pallas_kernels.decode import DecodeConfigError, LayerKind, Plan
from pallas_kernels.decode.ledger import Ledger, padded_bytes
from tests.decode.model import kernel_config, model_config

GIB, MIB = 2**30, 2**20


def k3(**changes):
    options = {"ranks": 32, "rows": 1, "capacity": 2048} | changes
    return Plan(decode_config(load_recipe("configs/k3.py").model, **options))


@pytest.fixture(scope="module")
def plan():
    return k3()


def test_exchanges_per_layer(plan):
    count = lambda **kind: len(plan.layer_exchanges(LayerKind(**kind)))  # noqa: E731
    assert count(mla=False, moe=True) == 4
    assert count(mla=True, moe=True) == 5
    assert count(mla=False, moe=False) == 2
    assert len(plan.step_exchanges) == 1 + 2 + 68 * 4 + 24 * 5 + 1


def test_sums_of_eight_rows_travel_in_slices():
    """Whole parts would keep the links busy for 27 us; slices cost an exchange more."""
    eight = k3(rows=8)
    assert eight.sum_exchanges("mixer_sum") == ("mixer_sum_slices", "mixer_sum_total")
    assert len(eight.layer_exchanges(LayerKind(mla=False, moe=True))) == 6
    assert max(exchange.sent(32) for exchange in eight.exchanges.values()) <= BLOCKS.whole_sum_bytes


def test_sums_of_two_rows_travel_whole():
    """6.6 us on the links, and an exchange less."""
    two = k3(rows=2)
    assert two.sum_exchanges("mixer_sum") == ("mixer_sum",)
    assert len(two.layer_exchanges(LayerKind(mla=True, moe=True))) == 5


def test_a_cut_cache_costs_two_exchanges():
    cut = k3(cache_ranks=32, capacity=2**20)
    assert len(cut.mixer_exchanges(True)) == len(k3().mixer_exchanges(True)) + 2


@pytest.mark.parametrize("rows", [1, 8])
def test_memory_of_a_core(rows):
    blocks = dataclasses.replace(BLOCKS, banks=BLOCKS.banks if rows == 1 else 32, expert_slots=16 if rows == 1 else 12)
    ledger = Ledger(k3(rows=rows, slots=2 * rows, blocks=blocks))
    assert sum(ledger.vmem.values()) <= 60 * MIB
    assert sum(ledger.hbm.values()) <= 90 * GIB


def test_a_million_tokens_fit(plan):
    ledger = Ledger(k3(cache_ranks=32, capacity=2**20))
    assert sum(ledger.hbm.values()) <= 90 * GIB
    assert ledger.hbm["latent"] == 24 * 2**15 * 640 * 2


def test_bytes_of_a_step(plan):
    ledger = Ledger(plan)
    assert abs(ledger.minimum_bytes / 137.8e9 - 1) < 1e-3  # spec: 111.1 dense + 25.8 routed + 0.87 states
    assert ledger.step_bytes <= 1.10 * ledger.minimum_bytes
    assert max(ledger.padding.values()) < 1.12


def test_a_row_reads_and_writes_one_state():
    """However many slots the caches have."""
    states = [Ledger(k3(rows=6, slots=slots)).step["states"] for slots in (6, 16)]
    assert states[0] == states[1] == 6 * Ledger(k3()).step["states"]
    assert Ledger(k3()).step["states"] > 2 * 4 * 69 * 96 * 128**2


def test_records_are_dense(plan):
    """An expert's slice on one of 32 ranks: 40 rows of 3584 words, of which the released bytes are 96 %."""
    assert plan.record.shape == (40, 3584)
    assert 17_547_264 / 32 / padded_bytes(jax.ShapeDtypeStruct(plan.record.shape, jnp.int32)) > 0.95


@pytest.mark.parametrize(
    ("shape", "dtype", "size"),
    [
        ((1, 7168), jnp.float32, 7168 * 4),
        ((3, 128), jnp.float32, 4 * 128 * 4),
        ((9, 100), jnp.float32, 16 * 128 * 4),
        ((5, 1, 128), jnp.bfloat16, 5 * 2 * 128 * 2),
        ((2, 17, 128), jnp.bfloat16, 2 * 32 * 128 * 2),
    ],
)
def test_padded_bytes(shape, dtype, size):
    assert padded_bytes(jax.ShapeDtypeStruct(shape, dtype)) == size


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rows": 9}, "rows = 9: expected 1 to 8"),
        ({"rows": 3, "slots": 2}, "slots = 2: expected at least 3, the rows of a step"),
        ({"ranks": 3}, "hidden = 256: expected a multiple of ranks = 3"),
        ({"ranks": 8}, "kda.heads = 4: expected a multiple of ranks = 8"),
        ({"capacity": 60}, "capacity = 60: expected a multiple of 16"),
        ({"cache_ranks": 2}, "cache_ranks = 2: expected 1 or ranks = 4"),
        ({"blocks": {"tile_rows": 100}}, "blocks.tile_rows = 100: expected a multiple of 128"),
    ],
)
def test_what_is_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        kernel_config(model_config(), **changes)


def test_a_model_without_mla_layers():
    with pytest.raises(ConfigError, match="layers = 3: expected layers of KDA, of MLA and of MoE among them"):
        kernel_config(model_config(layers=3))


def test_more_banks_than_the_head_has_tiles():
    with pytest.raises(DecodeConfigError, match="blocks.banks = 5: expected at most 4"):
        Plan(kernel_config(model_config(), blocks={"banks": 5}))
