"""MXFP4 against arithmetic in float64 and against ml_dtypes' own four-bit type."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from k3_jax.dtypes import E2M1_VALUES, mxfp4_decode, mxfp4_encode

ALL_BYTES = np.arange(256, dtype=np.uint8).reshape(16, 16)  # every pair of codes, 16 groups of 32


def oracle(packed: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """Element 2i is the low nibble of byte i; float64 holds every value exactly."""
    out = np.empty((*packed.shape[:-1], packed.shape[-1] * 2))
    for index in np.ndindex(*out.shape):
        *row, i = index
        code = int(packed[(*row, i // 2)]) >> 4 * (i % 2) & 15
        value = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0][code & 7] * 2.0 ** (int(scale[(*row, i // 32)]) - 127)
        out[index] = -value if code & 8 else value
    return out


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_every_code_and_scale_is_exact(dtype):
    unit = oracle(ALL_BYTES, np.full((16, 1), 127, np.uint8))
    for e in range(253):
        got = mxfp4_decode(ALL_BYTES, np.full((16, 1), e, np.uint8), dtype)
        assert got.dtype == dtype
        np.testing.assert_array_equal(got.astype(np.float64), unit * 2.0 ** (e - 127), strict=True)
        np.testing.assert_array_equal(np.signbit(got), np.signbit(unit))  # -0 is kept


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("e", [0, 1, 2, 126, 127, 252])
def test_device_decode_has_the_bits_of_the_host(dtype, e, strict_promotion):
    scale = np.full((16, 1), e, np.uint8)
    got = jax.jit(lambda p, s: mxfp4_decode(p, s, dtype))(jnp.asarray(ALL_BYTES), jnp.asarray(scale))
    assert np.asarray(got).tobytes() == mxfp4_decode(ALL_BYTES, scale, np.dtype(dtype)).tobytes()


def test_the_ends_of_the_scale():
    small = np.zeros((1, 16), np.uint8)
    small[0, 0] = 0x21
    top = mxfp4_decode(small, np.array([[254]], np.uint8), np.float32)
    assert top[0, 0] == 2.0**126 and top[0, 1] == 2.0**127
    with pytest.raises(ValueError, match="overflow"):
        mxfp4_decode(small | 0x77, np.array([[254]], np.uint8), np.float32)  # 6 x 2 ** 127
    with pytest.raises(ValueError, match=r"scale\[0, 0\] = 255"):
        mxfp4_decode(small, np.array([[255]], np.uint8))
    nan = jax.jit(mxfp4_decode)(jnp.asarray(small), jnp.full((1, 1), 255, jnp.uint8))
    assert jnp.isnan(nan).all()


def test_published_examples():
    def decode(data: bytes, *scales: int) -> np.ndarray:
        row = np.frombuffer(data, np.uint8)
        return mxfp4_decode(row, np.array(scales, np.uint8), np.float32)

    byte = decode(bytes([0xB2]) + bytes(15), 127)
    assert byte[:2].tolist() == [1.0, -1.5]
    assert decode(bytes([0xB2]) + bytes(15), 124)[:2].tolist() == [0.125, -0.1875]
    assert decode(bytes([0x21]) + bytes(15), 127)[:2].tolist() == [0.5, 1.0]
    words = b"".join(v.to_bytes(4, "little") for v in (0x76543210, 0xFEDCBA98)) * 4
    up = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    one = (up + [-v for v in up]) * 2
    np.testing.assert_array_equal(decode(words, 127, 128), one + [2 * v for v in one])


def test_nibble_order_is_what_the_reference_says_and_a_swap_is_seen():
    rng = np.random.default_rng(0)
    packed = rng.integers(0, 256, (4, 32), dtype=np.uint8)
    scale = rng.integers(118, 123, (4, 2), dtype=np.uint8)
    native = np.stack([packed & 15, packed >> 4], -1).reshape(4, 64).view(np.uint8)
    values = np.array([np.array(c, np.uint8).view(ml_dtypes.float4_e2m1fn) for c in native.ravel()]).astype(np.float32)
    expected = values.reshape(4, 2, 32) * scale.view(ml_dtypes.float8_e8m0fnu).astype(np.float32)[..., None]
    np.testing.assert_array_equal(mxfp4_decode(packed, scale, np.float32), expected.reshape(4, 64))
    swapped = mxfp4_decode((packed << 4) | (packed >> 4), scale, np.float32)
    assert (swapped != expected.reshape(4, 64)).mean() > 0.8


def test_encode_rounds_to_nearest_even_and_clips():
    grid = np.array(E2M1_VALUES)
    for values in (np.linspace(-7.9, 7.9, 1599), (grid[1:] + grid[:-1]) / 2, -(grid[1:] + grid[:-1]) / 2):
        groups = np.zeros((len(values), 32), np.float32)
        groups[:, 0] = 4.0  # fixes the scale at 1 for |value| < 8
        groups[:, 1] = values
        packed, scale = mxfp4_encode(groups)
        assert (scale == 127).all()
        got = mxfp4_decode(packed, scale, np.float32)[:, 1]
        expected = np.clip(values, -6, 6).astype(ml_dtypes.float4_e2m1fn).astype(np.float32)
        np.testing.assert_array_equal(got, expected)


def test_scale_is_the_floor_of_the_logarithm():
    rng = np.random.default_rng(1)
    x = (rng.standard_normal((64, 32)) * 2.0 ** rng.integers(-30, 30, (64, 1))).astype(np.float32)
    expected = np.floor(np.log2(np.abs(x).max(-1))) - 2 + 127
    np.testing.assert_array_equal(mxfp4_encode(x)[1][:, 0], expected)
    for e in range(2, 250, 31):  # +-6 x 2 ** e is exact
        x = np.full((1, 32), 6 * 2.0 ** (e - 127), np.float32) * np.where(np.arange(32) % 2, -1, 1).astype(np.float32)
        packed, scale = mxfp4_encode(x)
        assert scale.item() == e
        np.testing.assert_array_equal(mxfp4_decode(packed, scale, np.float32), x)


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_encode_is_idempotent_and_decoded_values_survive(dtype):
    rng = np.random.default_rng(2)
    packed = rng.integers(0, 256, (64, 64), dtype=np.uint8)
    packed[:3] = np.array([0, 0x88, 0x11], np.uint8)[:, None]  # zeros, negative zeros, the smallest code only
    scale = rng.integers(0, 253, (64, 4), dtype=np.uint8)
    x = mxfp4_decode(packed, scale, dtype)
    again = mxfp4_encode(x)
    assert mxfp4_decode(*again, dtype).tobytes() == x.tobytes()
    for first, second in zip(again, mxfp4_encode(mxfp4_decode(*again, dtype)), strict=True):
        np.testing.assert_array_equal(first, second)


def test_bytes_survive_where_every_group_reaches_four():
    rng = np.random.default_rng(3)
    packed = rng.integers(0, 256, (32, 64), dtype=np.uint8)
    packed[:, ::16] = 0x7F
    scale = rng.integers(0, 253, (32, 4), dtype=np.uint8)
    again = mxfp4_encode(mxfp4_decode(packed, scale))
    np.testing.assert_array_equal(again[0], packed)
    np.testing.assert_array_equal(again[1], scale)


def test_device_encode_has_the_bytes_of_the_host(strict_promotion):
    x = np.random.default_rng(4).standard_normal((16, 96)).astype(np.float32)
    for host, device in zip(mxfp4_encode(x), jax.jit(mxfp4_encode)(jnp.asarray(x)), strict=True):
        np.testing.assert_array_equal(host, np.asarray(device))


def test_errors():
    with pytest.raises(ValueError, match="multiple of 32"):
        mxfp4_encode(np.ones((2, 33), np.float32))
    with pytest.raises(ValueError, match="not finite"):
        mxfp4_encode(np.full((2, 32), np.nan, np.float32))
    with pytest.raises(ValueError, match="scale has shape"):
        mxfp4_decode(np.zeros((2, 32), np.uint8), np.zeros((2, 1), np.uint8))
