"""A program that generates with the decode kernel in the TPU interpreter: packed directory and arguments in, rows out.

It is a process of its own, like the cases of tests/decode: a kernel that waits for ever must not stop the tests.
"""

import json
import sys
from pathlib import Path

import numpy as np

from k3_jax.serve.megakernel import Engine
from k3_jax.serve.packed import Packed
from k3_jax.serve.sampling import SamplingConfig


def main(directory: str, prompts, capacity: int, steps: int, sampling, **options) -> list[list[int]]:
    """Of every step the rows' tokens, -2 where a row has none."""
    engine = Engine.load(Packed.open(Path(directory)), rows=len(prompts), capacity=capacity, steps=steps)
    configs = [SamplingConfig(**row) for row in sampling]
    return np.stack(list(engine.generate(prompts, sampling=configs, **options))).tolist()


if __name__ == "__main__":
    print(json.dumps(main(**json.loads(sys.argv[1]))))
