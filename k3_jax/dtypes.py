"""MXFP4: four-bit weights as the released checkpoint stores its routed experts.

A value is `code * 2 ** (scale - 127)`. The code is E2M1 (bit 3 sign, bits 2..0 one of 0, .5, 1, 1.5, 2, 3, 4, 6); the
scale is one E8M0 byte for 32 consecutive elements of the last axis, which is the *input* dimension of the projection.
Two codes share a byte: element 2i in the low nibble, element 2i + 1 in the high one (K3 report §4.1.4; OCP MX 1.0).

Decoding builds float32 bit patterns with integer arithmetic. Multiplying by a power of two would be shorter and wrong:
XLA flushes subnormals, so scale byte 0 (2 ** -127) would decode to zero. NumPy arrays are decoded on the host through
a table of those same patterns (two elements per look-up), JAX arrays on their device; encoding is one code for both.
"""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jaxtyping import Float, UInt8

GROUP = 32  # elements that share one scale
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E8M0_BIAS = 127
E8M0_NAN = 255
# A group of zeros has no exponent of its own; 2 ** 0 keeps every consumer away from the ends of the range.
ZERO_GROUP_SCALE = E8M0_BIAS

_ROWS_PER_STEP = 1 << 20  # bytes decoded at a time: bounds the index array of the table look-up

Array = np.ndarray | jax.Array


def _float32_bits(code, scale, xp):
    """Bit pattern of `code * 2 ** (scale - 127)` in float32; `code` and `scale` are int32 arrays of `xp`.

    Exact for scales 0..252, subnormal results included; codes 4..6 of scales 253 and 254 overflow to infinity.
    """
    magnitude = code & 7
    # Leading exponent and the one mantissa bit of E2M1; code 1 (0.5) is the format's own subnormal.
    exponent = scale + xp.where(magnitude < 2, -1, (magnitude >> 1) - 1)
    half = xp.where(magnitude < 2, 0, magnitude & 1)
    significand = (1 << 23) | (half << 22)
    normal = (exponent << 23) | (half << 22)
    subnormal = significand >> xp.clip(1 - exponent, 0, 2)
    bits = xp.where(exponent >= 1, normal, subnormal)
    bits = xp.where(exponent >= 255, 0x7F800000, bits)
    return xp.where(magnitude == 0, 0, bits).astype(xp.uint32) | ((code >> 3).astype(xp.uint32) << 31)


@functools.cache
def _pair_table(dtype: np.dtype) -> np.ndarray:
    """[256 scales * 256 bytes]: both elements of a packed byte as one unsigned word of twice `dtype`'s width."""
    scale, byte = np.meshgrid(np.arange(256, dtype=np.int32), np.arange(256, dtype=np.int32), indexing="ij")
    codes = np.stack([byte & 15, byte >> 4], axis=-1)
    bits = _float32_bits(codes, np.broadcast_to(scale[..., None], codes.shape), np)
    with np.errstate(over="ignore"):
        values = np.ascontiguousarray(bits.view(np.float32).astype(dtype))
    return values.view(np.dtype(f"u{2 * dtype.itemsize}")).reshape(-1)


def _check_shapes(packed: Array, scale: Array) -> None:
    expected = packed.shape[:-1] + (packed.shape[-1] * 2 // GROUP,)
    if packed.dtype != np.uint8 or scale.dtype != np.uint8:
        raise ValueError(f"packed and scale are {packed.dtype} and {scale.dtype}: expected uint8")
    if packed.shape[-1] * 2 % GROUP or scale.shape != expected:
        raise ValueError(f"scale has shape {tuple(scale.shape)}: expected {expected} for packed {tuple(packed.shape)}")


def _decode_host(packed: np.ndarray, scale: np.ndarray, dtype: np.dtype) -> np.ndarray:
    top = int(scale.max(initial=0))
    if top == E8M0_NAN:
        where = tuple(int(i) for i in np.argwhere(scale == E8M0_NAN)[0])
        raise ValueError(f"scale{list(where)} = 255 (NaN in E8M0): expected 0..254")
    table, groups = _pair_table(dtype), scale.reshape(-1)
    rows = packed.reshape(-1, GROUP // 2)
    out = np.empty(rows.shape, table.dtype)
    step = _ROWS_PER_STEP // (GROUP // 2)
    for start in range(0, len(rows), step):
        part = slice(start, start + step)
        index = (groups[part].astype(np.intp) << 8)[:, None] | rows[part]
        np.take(table, index, out=out[part])
    values = out.view(dtype).reshape(packed.shape[:-1] + (packed.shape[-1] * 2,))
    if top >= 253 and not np.isfinite(values.astype(np.float32)).all():
        raise ValueError(f"scale = {top}: the values overflow {dtype}")
    return values


def mxfp4_codes(packed: UInt8[Array, "... half_n"]) -> UInt8[Array, "... n"]:
    """The E2M1 codes of packed bytes, a byte each; NumPy or JAX."""
    xp = np if isinstance(packed, np.ndarray) else jnp
    return xp.stack([packed & 15, packed >> 4], axis=-1).reshape(*packed.shape[:-1], -1)


def mxfp4_decode(
    packed: UInt8[Array, "... half_n"], scale: UInt8[Array, "... groups"], dtype=ml_dtypes.bfloat16
) -> Float[Array, "... n"]:
    """Packed codes and their scales -> values of `dtype` (float32 or bfloat16), exactly.

    NumPy in, NumPy out: raises ValueError for scale byte 255 (NaN) and for values beyond the range of `dtype` (6 x 2 **
    127 has none). JAX in, JAX out, usable under jit: those become NaN and infinity.
    """
    _check_shapes(packed, scale)
    if isinstance(packed, np.ndarray):
        return _decode_host(packed, scale, np.dtype(dtype))
    codes = mxfp4_codes(packed).reshape(*scale.shape, GROUP).astype(jnp.int32)
    bits = _float32_bits(codes, scale[..., None].astype(jnp.int32), jnp)
    bits = jnp.where(scale[..., None] == E8M0_NAN, jnp.uint32(0x7FC00000), bits)
    bits = bits.reshape(*packed.shape[:-1], packed.shape[-1] * 2)
    if jnp.dtype(dtype) == jnp.bfloat16:  # a value conversion would flush subnormals; the low half is zero
        return jax.lax.bitcast_convert_type((bits >> 16).astype(jnp.uint16), jnp.bfloat16)
    return jax.lax.bitcast_convert_type(bits, jnp.float32).astype(dtype)


def _e2m1_codes(magnitude, xp):
    """Round-to-nearest-even onto the E2M1 grid; ties go to the code with an even last bit; above 6 clips to 6."""
    code = xp.zeros(magnitude.shape, xp.uint8)
    for midpoint, tie_rounds_up in ((0.25, 0), (0.75, 1), (1.25, 0), (1.75, 1), (2.5, 0), (3.5, 1), (5.0, 0)):
        above = magnitude >= midpoint if tie_rounds_up else magnitude > midpoint
        code = code + above.astype(xp.uint8)
    return code


def mxfp4_encode(
    values: Float[Array, "... n"],
) -> tuple[UInt8[Array, "... half_n"], UInt8[Array, "... groups"]]:
    """Values -> (packed, scale) with scale 2 ** (floor(log2 amax) - 2) for each 32 elements of the last axis.

    Idempotent: decoding the result and encoding again gives the same bytes, and every decoded tensor keeps its values.
    (Its bytes may differ from those it was decoded from, where a group's largest code was below 4.0: the same values
    then have several encodings, and this is the one with the smallest scale.) NumPy or JAX; the host path raises
    ValueError for values that are not finite.
    """
    xp = np if isinstance(values, np.ndarray) else jnp
    if values.shape[-1] % GROUP:
        raise ValueError(f"last axis has {values.shape[-1]} elements: expected a multiple of {GROUP}")
    groups = values.reshape(*values.shape[:-1], -1, GROUP)
    groups = groups.astype(xp.promote_types(groups.dtype, xp.float32))
    amax = xp.abs(groups).max(axis=-1, keepdims=True)
    if xp is np and not np.isfinite(amax).all():
        raise ValueError("values are not finite: MXFP4 has no infinity and no NaN")
    exponent = xp.frexp(amax)[1] - 3  # frexp's fraction is in [0.5, 1): floor(log2 amax) = exponent - 1
    scale = xp.where(amax == 0, ZERO_GROUP_SCALE, xp.clip(exponent + E8M0_BIAS, 0, 254)).astype(xp.int32)
    codes = _e2m1_codes(xp.ldexp(xp.abs(groups), E8M0_BIAS - scale), xp)
    codes = codes | (xp.signbit(groups).astype(xp.uint8) << 3)
    codes = codes.reshape(*values.shape[:-1], -1, 2)
    return codes[..., 0] | (codes[..., 1] << 4), scale[..., 0].astype(xp.uint8)
