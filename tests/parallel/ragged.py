"""`jax.lax.ragged_all_to_all` by an all-gather, so that CPUs run what TPUs do, with the sizes that were promised."""

import contextlib
from unittest import mock

import jax
import jax.numpy as jnp

from k3_jax.parallel import expert, loan


def dense_exchange(operand, output, input_offsets, send_sizes, output_offsets, recv_sizes, *, axis_name):
    me, R = jax.lax.axis_index(axis_name), jax.lax.axis_size(axis_name)
    for_me = lambda x: jax.lax.all_gather(x.reshape(R, -1), axis_name)[:, me].reshape(-1)  # noqa: E731
    at, size, there = (for_me(x) for x in (input_offsets, send_sizes, output_offsets))
    size = jnp.where(size == recv_sizes, size, -1)  # a broken promise loses the piece
    sent = jax.lax.all_gather(operand, axis_name)
    source = jnp.repeat(jnp.arange(R), at.size // R)
    row = jnp.arange(output.shape[0])[:, None]
    hit = (row >= there[None]) & (row < (there + size)[None])
    piece = jnp.argmax(hit, axis=1)
    arrived = sent[source[piece], (at - there)[piece] + row[:, 0]]
    return jnp.where(hit.any(1).reshape(-1, *[1] * (output.ndim - 1)), arrived, output)


@contextlib.contextmanager
def ragged_transport():
    """The TPU's path through parallel.expert on fake CPU devices, whatever the number of ranks."""
    with (
        mock.patch.object(jax.lax, "ragged_all_to_all", dense_exchange),
        mock.patch.object(expert, "on_tpu", lambda: True),
        mock.patch.object(loan, "on_tpu", lambda: True),
        mock.patch.object(expert, "FEW_RANKS", 0),
    ):
        yield
