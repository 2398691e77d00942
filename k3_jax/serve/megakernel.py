"""The engine behind `k3 generate --engine megakernel`: the decode kernel on all devices of a mesh.

There is no prefill of its own: the kernel reads a prompt token by token, as it decodes. So there is one copy of the
weights, and caches are in the kernel's layout from the first token on; a prompt takes as many steps as it has tokens.

B rows, P steps of one call, V vocabulary, n stop tokens.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from k3_jax.config import ConfigError, K3Config
from k3_jax.serve.decode import ENDED, GREEDY, stop_array
from k3_jax.serve.inputs import check_vocabulary
from k3_jax.serve.packed import Packed
from k3_jax.serve.sampling import NOT_FINITE, Sampler, SamplingConfig, choose
from pallas_kernels.decode import AXIS, Plan, decode_step, independent

STEPS = 16  # of one call
NONE = -1  # in place of a given token


@partial(jax.tree_util.register_dataclass, data_fields=["caches", "token", "position", "alive", "left"], meta_fields=[])
@dataclass(frozen=True)
class Rows:
    """Where rows stand: `position` tokens are in the caches. A row that is alive goes on with `token`, unless it is
    given another one, and may still choose `left` tokens."""

    caches: dict[str, Array]
    token: Int[Array, " B"]
    position: Int[Array, " B"]
    alive: Bool[Array, " B"]
    left: Int[Array, " B"]


def steps_program(plan: Plan, mesh: Mesh, steps: int) -> Callable:
    """A compiled function of (weights, rows, given [P + 1, B], sampler, stop [n]): `steps` = P steps of every row.

    Step i takes given[i], or where that is NONE the row's own token; rows with neither are idle. What follows a token
    is chosen unless given[i + 1] is there. Returns (tokens [P, B], rows): chosen tokens, ENDED where none was, and
    NOT_FINITE where logits are NaN, which ends the row. Rows are donated.
    """
    ranks, alike = PartitionSpec(AXIS), PartitionSpec()
    of_rows, slots = Rows(ranks, alike, alike, alike, alike), independent(plan.config.rows)

    def local(weights: dict, rows: Rows, given, sampler: Sampler, stop):
        weights, caches = ({name: x[0] for name, x in group.items()} for group in (weights, rows.caches))

        def one(carry):
            i, rows, tokens = carry
            token = jnp.where(given[i] == NONE, rows.token, given[i])
            live = (given[i] != NONE) | rows.alive
            position = jnp.where(live, rows.position, -1)
            out, caches = decode_step(plan, jnp.where(live, token, 0), position, slots, weights, rows.caches)
            logits = jax.lax.all_gather(out["logits"], AXIS, axis=1, tiled=True)
            rows = Rows(caches, token, rows.position + live, rows.alive, rows.left)
            rows = _choose(logits, rows, live & (given[i + 1] == NONE), sampler, stop)
            return i + 1, rows, tokens.at[i].set(rows.token)

        def running(carry):
            i, rows, _ = carry
            return (i < steps) & jnp.any(rows.alive | (given[jnp.minimum(i, steps)] != NONE))

        rows = Rows(caches, rows.token, rows.position, rows.alive, rows.left)
        tokens = jnp.full((steps, plan.config.rows), ENDED, jnp.int32)
        _, rows, tokens = jax.lax.while_loop(running, one, (0, rows, tokens))
        caches = {name: x[None] for name, x in rows.caches.items()}
        return tokens, Rows(caches, rows.token, rows.position, rows.alive, rows.left)

    program = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(ranks, of_rows, alike, alike, alike),
        out_specs=(alike, of_rows),
        check_vma=False,  # as in decode_program
    )
    return jax.jit(program, donate_argnums=1)


def _choose(
    logits: Float[Array, "B V"], rows: Rows, chooses: Bool[Array, " B"], sampler: Sampler, stop: Int[Array, " n"]
) -> Rows:
    """The next token of the rows that choose one; a stop token, the last that is left or a NaN ends a row."""
    token = jnp.where(chooses, choose(logits, rows.position, sampler), ENDED)
    left = rows.left - chooses
    ended = jnp.any(token[:, None] == stop[None], axis=1) | (token == NOT_FINITE) | (left == 0)
    return Rows(rows.caches, token, rows.position, chooses & ~ended, left)


@dataclass(frozen=True)
class Engine:
    """Weights on their devices, and the compiled steps for `plan.config.rows` rows of `plan.config.capacity` tokens."""

    model: K3Config
    plan: Plan
    mesh: Mesh
    weights: dict[str, Array]
    steps: int
    program: Callable

    @staticmethod
    def load(packed: Packed, *, rows: int, capacity: int, steps: int = STEPS) -> "Engine":
        """On the first devices, one for each rank. Raises ConfigError for damaged files or too few devices."""
        mesh, plan = rank_mesh(packed.cut.ranks), packed.cut.plan(rows, capacity)
        return Engine(packed.cut.model, plan, mesh, packed.load(plan, mesh), steps, steps_program(plan, mesh, steps))

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_tokens: int,
        sampling: SamplingConfig | Sequence[SamplingConfig] = GREEDY,
        stop: Iterable[int] = (),
    ) -> Iterator[Int[np.ndarray, " B"]]:
        """Streams tokens [B] of each step in which a row has one, ENDED where a row has none; a stop token is its last.

        Raises:
            ConfigError: not as many prompts as rows, an empty one, or no room for `max_tokens`.
            FloatingPointError: logits that are not numbers.
        """
        given, sampler = self._given(prompts, max_tokens), Sampler.of(self._sampling(sampling))
        return self._generate(given, max_tokens, sampler, stop_array(stop))

    def _given(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> Int[np.ndarray, "T B"]:
        """The prompts side by side, NONE after their ends."""
        c, lengths = self.plan.config, [len(prompt) for prompt in prompts]
        if len(lengths) != c.rows or not all(lengths):
            raise ConfigError(f"prompts = {lengths} tokens: expected {c.rows} prompts, and at least one token in each")
        if max_tokens < 1 or max(lengths) + max_tokens > c.capacity:
            limit = f"expected 1..{c.capacity - max(lengths)} after a prompt of {max(lengths)} tokens"
            raise ConfigError(f"max_tokens = {max_tokens}: {limit}")
        given = np.full((max(lengths), c.rows), NONE, np.int32)
        for row, prompt in enumerate(prompts):
            check_vocabulary(prompt, self.model, "prompt")
            given[: len(prompt), row] = prompt
        return given

    def _sampling(self, sampling: SamplingConfig | Sequence[SamplingConfig]) -> list[SamplingConfig]:
        rows = self.plan.config.rows
        configs = [sampling] * rows if isinstance(sampling, SamplingConfig) else list(sampling)
        if len(configs) != rows:
            raise ConfigError(f"sampling = {len(configs)} configurations: expected one, or one for each of {rows} rows")
        return configs

    def _generate(self, given, max_tokens: int, sampler: Sampler, stop) -> Iterator[np.ndarray]:
        rows, at = self._empty(max_tokens), 0
        while at < len(given) or np.any(np.asarray(rows.alive)):
            window = np.full((self.steps + 1, given.shape[1]), NONE, np.int32)
            part = given[at : at + self.steps + 1]
            window[: len(part)] = part
            with interpreted_on_cpus(self.mesh):
                tokens, rows = self.program(self.weights, rows, jnp.asarray(window), sampler, stop)
            at += self.steps
            for step in np.asarray(tokens):
                if np.any(step == NOT_FINITE):
                    raise FloatingPointError(f"row {np.argmax(step == NOT_FINITE)}: the logits are not numbers (NaN)")
                if np.any(step != ENDED):
                    yield step

    def _empty(self, max_tokens: int) -> Rows:
        """Rows before their first token."""
        c, ranks = self.plan.config, NamedSharding(self.mesh, PartitionSpec(AXIS))
        alike = NamedSharding(self.mesh, PartitionSpec())

        def make() -> Rows:
            caches = {name: jnp.zeros((c.ranks, *x.shape), x.dtype) for name, x in self.plan.caches.items()}
            token = jnp.full((c.rows,), ENDED, jnp.int32)
            return Rows(caches, token, jnp.zeros_like(token), token >= 0, jnp.full_like(token, max_tokens))

        return jax.jit(make, out_shardings=Rows(ranks, alike, alike, alike, alike))()


def rank_mesh(ranks: int) -> Mesh:
    """The first `ranks` devices."""
    if len(jax.devices()) < ranks:
        found = f"{len(jax.devices())} {jax.devices()[0].platform} devices"
        raise ConfigError(f"--engine megakernel: {found}: expected {ranks}, for which the weights were packed")
    return Mesh(np.array(jax.devices()[:ranks]), (AXIS,))


def fake_cpus(count: int) -> None:
    """So many devices on a CPU, unless the environment has said how many, or one has been used already. What is
    compiled for them is not cached, as in `cli`."""
    if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
        try:
            jax.config.update("jax_num_cpu_devices", count)
            if jax.devices()[0].platform == "cpu":
                jax.config.update("jax_enable_compilation_cache", False)
        except RuntimeError:
            return  # devices are there; `rank_mesh` tells if they are too few


def interpreted_on_cpus(mesh: Mesh):
    """Where there is no TPU the kernel runs in the TPU interpreter: slow, and the same arithmetic."""
    cpu = mesh.devices.flat[0].platform == "cpu"
    return pltpu.force_tpu_interpret_mode(pltpu.InterpretParams()) if cpu else nullcontext()
