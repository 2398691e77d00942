"""Packing is exact: records give back their codes and scales, caches their rows, and a model's arrays survive."""

import jax.numpy as jnp
import numpy as np
import pytest

from k3_jax.config import ConfigError
from k3_jax.dtypes import mxfp4_decode
from k3_jax.serve.pack import expert_codes
from pallas_kernels.decode import Plan, reference
from pallas_kernels.decode.caches import from_ranks, to_ranks
from pallas_kernels.decode.pack import ExpertCodes, PackError, pack_records, unpack_records
from pallas_kernels.decode.record import Record
from tests.decode.model import kernel_config, model_config

RECORDS = [Record(latent=3584, expert=96), Record(latent=256, expert=32), Record(latent=512, expert=160)]


def random_codes(rng, experts, outputs, inputs):
    codes = rng.integers(0, 16, (experts, outputs, inputs), np.uint8)
    return ExpertCodes(codes, rng.integers(1, 255, (experts, outputs, inputs // 32), np.uint8))


@pytest.mark.parametrize("record", RECORDS, ids=str)
def test_records_give_back_what_they_hold(record):
    rng, E = np.random.default_rng(0), 3
    up = lambda: random_codes(rng, E, record.expert, record.latent)  # noqa: E731
    given = (up(), up(), random_codes(rng, E, record.latent, record.expert))
    words = pack_records(record, *given)
    assert words.shape == (E, *record.shape)
    for want, have in zip(given, unpack_records(record, words), strict=True):
        np.testing.assert_array_equal(have.codes, want.codes)
        np.testing.assert_array_equal(have.scales, want.scales)


@pytest.mark.parametrize(("scale", "message"), [(255, "is 255"), (0, "is 0")])
def test_scales_that_the_kernel_cannot_apply(scale, message):
    record, rng = RECORDS[1], np.random.default_rng(0)
    up, down = random_codes(rng, 1, 32, 256), random_codes(rng, 1, 256, 32)
    down.scales[0, 5, 0] = scale
    with pytest.raises(PackError, match=message):
        pack_records(record, up, up, down)


def test_experts_of_a_model():
    """Codes and scales stand for exactly the model's values; what MXFP4 cannot hold is refused by name."""
    rng = np.random.default_rng(0)
    codes = random_codes(rng, 2, 8, 64)
    codes.scales[...] = rng.integers(120, 130, codes.scales.shape)
    packed = codes.codes[..., ::2] | codes.codes[..., 1::2] << 4
    weight = mxfp4_decode(packed, codes.scales, np.float32).swapaxes(1, 2)
    again = expert_codes("w1", weight)
    packed = again.codes[..., ::2] | again.codes[..., 1::2] << 4
    np.testing.assert_array_equal(mxfp4_decode(packed, again.scales, np.float32).swapaxes(1, 2), weight)
    with pytest.raises(ConfigError, match="layers.1.moe.w1 is not MXFP4"):
        expert_codes("layers.1.moe.w1", weight + 0.01)


@pytest.mark.parametrize("cache_ranks", [1, 4])
def test_caches_of_ranks(cache_ranks):
    plan = Plan(kernel_config(model_config(), cache_ranks=cache_ranks))
    rng, empty = np.random.default_rng(0), reference.empty_caches(plan.config)
    of = lambda x: jnp.asarray(rng.integers(-100, 100, x.shape), jnp.float32)  # noqa: E731
    caches = reference.Caches(of(empty.S), of(empty.conv), of(empty.latent))
    ranks = to_ranks(plan, caches)
    assert {name: x.shape[1:] for name, x in ranks.items()} == {name: x.shape for name, x in plan.caches.items()}
    back = from_ranks(plan, ranks)
    for name in ("S", "conv", "latent"):
        np.testing.assert_array_equal(getattr(back, name), getattr(caches, name))


def test_a_cut_cache_deals_tiles_in_turn():
    """Token s is in tile s // 16, which is rank (s // 16) % 4's."""
    plan = Plan(kernel_config(model_config(), cache_ranks=4))
    empty = reference.empty_caches(plan.config)
    positions = jnp.broadcast_to(jnp.arange(64.0)[:, None], empty.latent.shape)
    latent = to_ranks(plan, reference.Caches(empty.S, empty.conv, positions))["latent"]
    for rank in range(4):
        np.testing.assert_array_equal(latent[rank, 0, 0, :, 0].astype(np.float32), np.arange(16 * rank, 16 * rank + 16))
