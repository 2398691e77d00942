"""A model's tensors with zeros up to the sizes that the decode kernel is made for (`pack.widened`).

It changes no result: norms and scales divide by the model's own sizes (`Widths`), a product with zeros adds nothing,
and SiLU and SiTU of zeros are zeros. Axes are told by the letters of the table of names; those of several parts (a
head's nope and extra key) grow part by part.
"""

from collections.abc import Iterator

import numpy as np

from k3_jax.config import K3Config
from k3_jax.dtypes import GROUP, ZERO_GROUP_SCALE
from k3_jax.serve.pack import widened
from k3_jax.weights.names import text_parameters
from pallas_kernels.decode import ExpertCodes, Tensors

Sizes = dict[str, tuple[int, ...]]  # of the parts of an axis, by its letter


class Widened(Tensors):
    def __init__(self, tensors: Tensors, config: K3Config, ranks: int):
        self._tensors = tensors
        self._letters = {p.name: p.row.axes.split("->")[1].split() for p in text_parameters(config)}
        self._old, self._new = _sizes(config), _sizes(widened(config, ranks))

    def __getitem__(self, name: str) -> np.ndarray:
        array = self._tensors[name]
        for axis, letter in enumerate(self._letters[name]):
            array = self._grown(array, axis, letter)
        return array

    def codes(self, name: str, start: int, stop: int) -> ExpertCodes:
        """Of new groups the scale is 1 and the codes 0."""
        given = self._tensors.codes(name, start, stop)
        codes, scales = given.codes, given.scales
        for axis, letter in ((1, self._letters[name][1]), (2, self._letters[name][0])):  # [E, out, in]
            codes = self._grown(codes, axis, letter)
        (out,), (inputs,) = (self._new[letter] for letter in reversed(self._letters[name]))
        missing = ((0, 0), (0, out - scales.shape[1]), (0, inputs // GROUP - scales.shape[2]))
        if any(map(any, missing)):
            scales = np.pad(scales, missing, constant_values=ZERO_GROUP_SCALE)
        return ExpertCodes(codes, scales)

    def _grown(self, array: np.ndarray, axis: int, letter: str) -> np.ndarray:
        old, new = (sizes.get(letter) for sizes in (self._old, self._new))
        if old == new:
            return array
        parts = np.split(array, np.cumsum(old)[:-1], axis)
        return np.concatenate([_padded(part, axis, size) for part, size in zip(parts, new, strict=True)], axis)

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


def _padded(array: np.ndarray, axis: int, size: int) -> np.ndarray:
    missing = [(0, 0)] * array.ndim
    missing[axis] = (0, size - array.shape[axis])
    return np.pad(array, missing)


def _sizes(config: K3Config) -> Sizes:
    """Of the axes that may grow: the letters are those of `weights.names`."""
    mla, K = config.mla, config.kda.head_dim
    nope, pe, v, C = mla.qk_nope_head_dim, mla.qk_rope_head_dim, mla.v_head_dim, mla.kv_lora_rank
    sizes = {"D": (config.hidden_size,), "K": (K,), "R": (K,), "C": (C,), "V": (v,)}
    sizes |= {"X": (C, pe), "P": (nope, pe), "U": (nope, v)}
    return sizes | {"L": (config.moe.latent_dim,), "F": (config.moe.expert_dim,)}
