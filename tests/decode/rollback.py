"""Steps whose rows are tokens of one sequence, in a process of its own (see case.py): the kernel in TPU interpret mode
against a recomputation of each sequence from its start, token by token, by one row of the reference step.

    outcome = run("draft")
    outcome["errors"], outcome["untouched"], outcome["refused"]
"""

import json
import sys
from dataclasses import asdict, dataclass
from functools import cache, partial

from tests.decode.case import Mutation, child, import_kernel

START = 13  # tokens before a sequence's first; the caches' tiles are 16 tokens


@dataclass(frozen=True)
class Setting:
    """`layers` 5 are of every kind."""

    scenario: str
    layers: int = 5
    ranks: int = 2
    cache_ranks: int = 1
    mode: str = "eager"
    races: bool = True
    mutations: tuple[Mutation, ...] = ()


def run(setting: Setting, timeout: int = 300) -> dict:
    """Raises as `case.run`."""
    done = child("tests.decode.rollback", [json.dumps(asdict(setting))], setting.ranks, timeout)
    return json.loads(done.stdout.splitlines()[-1]) | {"clean": "non-zero" not in done.stderr, "stderr": done.stderr}


def main(setting: Setting) -> dict:
    import_kernel(setting.mutations)
    import jax.numpy as jnp
    from jax.experimental.pallas import tpu as pltpu

    from tests.decode.model import kernel_config, model_config

    rows = SCENARIOS[setting.scenario]
    model = model_config(setting.layers, max(setting.ranks, 4))
    config = kernel_config(
        model,
        ranks=setting.ranks,
        rows=rows,
        slots=8,
        cache_ranks=setting.cache_ranks,
        blocks={"banks": 3},
        dtype=jnp.float32,
    )
    params = pltpu.InterpretParams(dma_execution_mode=setting.mode, detect_races=setting.races, on_race="warn")
    with pltpu.force_tpu_interpret_mode(params):
        steps = Steps(config, model)
        refused = globals()[setting.scenario](steps)
    return {"errors": steps.errors, "untouched": steps.untouched, "races": steps.races, "refused": refused}


@dataclass(frozen=True)
class Tokens:
    """What a sequence has read by a row: these tokens, after the state of slot `start` and the latents of `latent`."""

    start: int
    latent: int
    tokens: tuple[int, ...]


class Steps:
    """The kernel's caches, and what each of its steps has shown."""

    def __init__(self, config, model):
        import jax
        import jax.numpy as jnp
        import numpy as np
        from jax.sharding import Mesh, NamedSharding, PartitionSpec

        from k3_jax.serve.pack import pack
        from pallas_kernels.decode import AXIS, Plan, independent, reference, verify_program
        from pallas_kernels.decode.caches import to_ranks
        from tests.decode.model import weights
        from tests.decode.steps import random_caches

        named, mesh = weights(model), Mesh(np.array(jax.devices()), (AXIS,))
        self.plan, self.named = Plan(config), jax.tree.map(jnp.asarray, named)
        self.before = random_caches(self.plan)
        # Where the program leaves them, or it would be compiled again for its own results.
        of_ranks = (pack(self.plan, named), to_ranks(self.plan, self.before))
        self.packed, self.ranks = jax.device_put(of_ranks, NamedSharding(mesh, PartitionSpec(AXIS)))
        self.program = verify_program(self.plan, mesh)
        self.one = jax.jit(partial(reference.step, slots=independent(1), config=config, dtype=config.dtype))
        self.recomputed = cache(self._recomputed)
        self.origin, self.untouched, self.errors = self.before, True, {}

    def _recomputed(self, row: Tokens):
        """(logits, caches of one slot) after the row."""
        import jax.numpy as jnp

        from pallas_kernels.decode.reference import Caches

        if not row.tokens:
            S, conv = (x[:, row.start : row.start + 1] for x in (self.origin.S, self.origin.conv))
            return None, Caches(S, conv, self.origin.latent[:, row.latent : row.latent + 1])
        _, caches = self.recomputed(Tokens(row.start, row.latent, row.tokens[:-1]))
        position = START + len(row.tokens) - 1
        return self.one(self.named, caches, jnp.array(row.tokens[-1:]), jnp.array([position]))

    def step(self, slots, rows: list[Tokens | None]) -> None:
        """One step of the kernel; None is a row that is idle. Compares logits and all slots."""
        import jax
        import jax.numpy as jnp
        import numpy as np

        from pallas_kernels.decode.caches import from_ranks

        rows = [*rows, *[None] * (self.plan.config.rows - len(rows))]
        token = jnp.array([row.tokens[-1] if row else 0 for row in rows])
        position = jnp.array([START + len(row.tokens) - 1 if row else -1 for row in rows])
        _, logits, self.ranks = self.program(self.packed, self.ranks, token, position, slots)
        now = from_ranks(self.plan, jax.tree.map(jnp.asarray, jax.device_get(self.ranks)))
        want = {name: np.array(getattr(self.before, name)) for name in ("S", "conv", "latent")}
        touched = {name: np.zeros(x.shape[1], bool) for name, x in want.items()}
        for number, row in enumerate(rows):
            if row is None:
                continue
            expected, caches = self.recomputed(row)
            self._note("logits", logits[number], expected[0])
            for name, slot in (("S", slots.exit), ("conv", slots.exit), ("latent", slots.latent)):
                at = ... if name != "latent" else slice(START, int(position[number]) + 1)
                want[name][:, slot[number]][:, at] = np.asarray(getattr(caches, name))[:, 0][:, at]
                touched[name][slot[number]] = True
        for name, x in want.items():
            have = np.asarray(getattr(now, name))
            self._note(name, have, x)
            self.untouched &= np.array_equal(have[:, ~touched[name]], x[:, ~touched[name]])
        self.before = now

    def _note(self, name: str, have, want) -> None:
        import numpy as np

        error = float(np.abs(np.asarray(have) - np.asarray(want)).max())
        self.errors[name] = float(np.maximum(self.errors.get(name, 0.0), error))  # a NaN stays

    @property
    def races(self) -> bool:
        from jax._src.pallas.mosaic.interpret import interpret_pallas_call

        return bool(interpret_pallas_call.races is not None and interpret_pallas_call.races.races_found)


# Scenarios; each gives what was refused.


def draft(steps: Steps) -> list[str]:
    """Draft 5, accept 2, three single steps, roll back 1, 2 and 3 tokens, each time to go on with another token."""
    from pallas_kernels.decode import Snapshots, together

    sequence, tokens, refused = Snapshots(range(8), latent=3, tokens=START), (), []

    def forward(*new: int, keep: int) -> None:
        nonlocal tokens
        slots = together(steps.plan.config, sequence.step(len(new)))
        steps.step(slots, [Tokens(0, 3, tokens + new[: row + 1]) for row in range(len(new))])
        sequence.accept(keep)
        tokens += new[:keep]

    forward(3, 77, 500, 9, 1105, 31, keep=3)
    for token in (8, 21, 4000):
        forward(token, keep=1)
    for count in (1, 2, 3):
        sequence.rollback(count)
        tokens = tokens[:-count]
        forward(100 + count, keep=1)
    for count in (5, 17):
        try:
            sequence.rollback(count)
        except ValueError as error:
            refused.append(str(error))
    return refused


def scattered(steps: Steps) -> list[str]:
    """Independent rows in slots 2, 0 and 5; then each leaves its state where another one's came from."""
    from pallas_kernels.decode import Slots, together

    slots, first, second = (2, 0, 5), (3, 77, 500), (9, 1105, 31)
    rows = [Tokens(slot, slot, (token,)) for slot, token in zip(slots, first, strict=True)]
    steps.step(together(steps.plan.config, arrays(Slots, slots, slots, slots)), rows)
    rows = [Tokens(row.start, row.latent, (*row.tokens, token)) for row, token in zip(rows, second, strict=True)]
    steps.step(together(steps.plan.config, arrays(Slots, slots, (0, 5, 2), slots)), rows)
    return []


def interleaved(steps: Steps) -> list[str]:
    """A chained sequence in slots 0 to 4 beside one of single steps in slots 6 and 7, in either order."""
    from pallas_kernels.decode import Snapshots, together

    chained, single = Snapshots(range(5), latent=0, tokens=START), Snapshots((6, 7), latent=6, tokens=START)
    a, b = Tokens(0, 0, ()), Tokens(6, 6, ())
    after = lambda x, *tokens: [Tokens(x.start, x.latent, x.tokens + tokens[: n + 1]) for n in range(len(tokens))]  # noqa: E731
    rows = [*after(a, 3, 77, 500), *after(b, 9)]
    steps.step(together(steps.plan.config, chained.step(3), single.step(1)), rows)
    chained.accept(2)
    single.accept(1)
    rows = [*after(rows[3], 8), *after(rows[1], 21, 1105)]
    steps.step(together(steps.plan.config, single.step(1), chained.step(2)), rows)
    return []


def stopping(steps: Steps) -> list[str]:
    """Rows of a chain that stop early, at its end and within it, before another sequence's row."""
    from pallas_kernels.decode import Slots

    chain = [Tokens(1, 1, (3,)), Tokens(1, 1, (3, 77))]
    other = Tokens(6, 6, (500,))
    steps.step(arrays(Slots, (1, -1, -1, 6), (2, 3, 4, 7), (1, 1, 1, 6)), [*chain, None, other])
    chain = [Tokens(1, 1, (*chain[1].tokens, 9)), None, Tokens(1, 1, (*chain[1].tokens, 9, 1105))]
    steps.step(arrays(Slots, (3, -1, -1, 7), (5, 3, 4, 0), (1, 1, 1, 6)), [*chain, None])
    return []


def arrays(make, *slots: tuple[int, ...]):
    import numpy as np

    return make(*(np.array(x, np.int32) for x in slots))


SCENARIOS = {"draft": 6, "scattered": 3, "interleaved": 4, "stopping": 4}  # rows

if __name__ == "__main__":
    fields = json.loads(sys.argv[1])
    fields["mutations"] = tuple(Mutation(**m) for m in fields["mutations"])
    print(json.dumps(main(Setting(**fields))))
