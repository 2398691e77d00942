"""The pieces in which `k3 score` computes logits are the whole, in order."""

import jax.numpy as jnp
import numpy as np

from k3_jax.serve import score_command
from tests.models import logits_of
from tests.serve.compare import assert_close


def test_pieces_are_the_whole(model, tokens, monkeypatch):
    """Groups of 2 rows, the last one of 1; pieces of 16 tokens, the last one of 7."""
    monkeypatch.setattr(score_command, "TOKENS_PER_CALL", 50)
    monkeypatch.setattr(score_command, "VALUES_PER_PIECE", 16 * 50)
    rows = np.concatenate([tokens[:, :23], tokens[:1, 30:53]])
    pieces = list(score_command.logit_pieces(model, rows, jnp.float32))
    assert [len(piece) for piece in pieces] == [16, 7] * 3
    assert_close(np.concatenate(pieces).reshape(3, 23, -1), logits_of(model, jnp.asarray(rows)))
