"""Kimi Delta Attention, slow and obvious: float64 NumPy, one token after the other, its backward pass by hand.

Shares no code with the project. One key head at a time, with the G value heads that read it: q and k are [K], v is
[G, V], g is [G, K], beta is [G] and the state S is [G, K, V].
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

TOKENS = ("q", "k", "v", "g", "beta")


class Run(NamedTuple):
    """Tokens of one batch row that share a state, in order; without tokens the state stays as it is.

    It starts from the initial state number `first` (None: from zeros) and ends in the final state number `last` (None:
    in one that nobody reads).
    """

    row: int
    tokens: np.ndarray
    first: int | None
    last: int | None


def step(S, q, k, v, g, beta):
    """The state after a token, the decayed state that its write met, and the error of the prediction for k."""
    decayed = np.exp(g)[:, :, None] * S
    error = v - k @ decayed
    return decayed + k[:, None] * (beta[:, None] * error)[:, None, :], decayed, error


def backward_step(D, do, before, token, scale):
    """From D, the gradient of the state after a token: that of the state before it, and those of the token's parts."""
    q, k, _, g, beta = token
    S, decayed, error = step(before, *token)
    dq = scale * np.einsum("gkv,gv->k", S, do)
    D = D + scale * q[:, None] * do[:, None, :]
    dv = beta[:, None] * (k @ D)
    dbeta = np.sum((k @ D) * error, axis=1)
    dk = np.einsum("gkv,gv->k", D, beta[:, None] * error) - np.einsum("gkv,gv->k", decayed, dv)
    D = D - k[:, None] * dv[:, None, :]
    return np.exp(g)[:, :, None] * D, (dq, dk, dv, np.sum(D * decayed, axis=2), dbeta)


def token(tokens, t):
    return [np.asarray(x[t], np.float64) for x in tokens]


def forward(S, tokens, scale):
    """The outputs, the last state, and the state before every n-th token, for an n near the root of the length."""
    outputs, kept = np.zeros(tokens[2].shape), []
    for t in range(len(outputs)):
        if t % math.isqrt(len(outputs)) == 0:
            kept.append(S)
        q, *others = token(tokens, t)
        S, _, _ = step(S, q, *others)
        outputs[t] = scale * (q @ S)
    return outputs, S, kept


def backward(D, do, kept, tokens, scale):
    """From D, the gradient of the last state: that of the first one, and those of the tokens."""
    gradients, stride = [np.zeros(x.shape) for x in tokens], math.isqrt(len(do))
    for block, S in reversed(list(enumerate(kept))):
        before = []
        for t in range(block * stride, min((block + 1) * stride, len(do))):
            before.append(S)
            S, _, _ = step(S, *token(tokens, t))
        for t in reversed(range(block * stride, block * stride + len(before))):
            D, parts = backward_step(D, np.asarray(do[t], np.float64), before.pop(), token(tokens, t), scale)
            for gradient, part in zip(gradients, parts, strict=True):
                gradient[t] = part
    return D, gradients


def kda(
    arguments: Mapping[str, np.ndarray], cotangents: Mapping[str, np.ndarray], runs: Sequence[Run], scale: float
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """The results `o` and `final_state` and, where they have cotangents, the gradient of every argument, by name.

    Outside the runs everything is zero.
    """
    H, K, HV, V = *arguments["q"].shape[2:], *arguments["v"].shape[2:]
    states = np.zeros((sum(run.last is not None for run in runs), HV, K, V))
    arguments = {"initial_state": states} | dict(arguments)
    results = {"o": np.zeros(arguments["v"].shape), "final_state": states.copy()}
    gradients = {name: np.zeros(arguments[name].shape) for name in (*TOKENS, "initial_state")}
    for run, head in itertools.product(runs, range(H)):
        values = slice(head * HV // H, (head + 1) * HV // H)
        at = {name: (run.row, run.tokens, head if name in ("q", "k") else values) for name in (*TOKENS, "o")}
        tokens = [arguments[name][at[name]] for name in TOKENS]
        S = _state(arguments["initial_state"], run.first, values)
        results["o"][at["o"]], S, kept = forward(S, tokens, scale)
        if run.last is not None:
            results["final_state"][run.last, values] = S
        if cotangents:
            D = _state(cotangents["final_state"], run.last, values)
            D, of_tokens = backward(D, cotangents["o"][at["o"]], kept, tokens, scale)
            for name, gradient in zip(TOKENS, of_tokens, strict=True):
                gradients[name][at[name]] = gradient
            if run.first is not None:
                gradients["initial_state"][run.first, values] = D
    return results, gradients if cotangents else {}


def _state(states, index, values):
    return np.zeros(states[0, values].shape) if index is None else np.asarray(states[index, values], np.float64)
