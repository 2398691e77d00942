"""Parts of the kernel alone, in TPU interpret mode on 4 fake devices: the largest error of each, as JSON.

Run in a process of its own by test_parts.py, for the reasons given in case.py.
"""

import json

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import Mesh, PartitionSpec

from k3_jax.serve.pack import pack
from pallas_kernels.decode import AXIS, Plan, attn_res, channels, head, independent, kda, mla, reference
from pallas_kernels.decode.caches import from_ranks, to_ranks
from pallas_kernels.decode.call import call
from tests.decode.model import kernel_config, model_config, weights
from tests.decode.steps import random_caches

POSITION, TOKEN = (15, 33), (3, 77)  # the last of a tile of the cache; the second of its third
MODEL = model_config(5)  # dense KDA, MoE KDA, MoE KDA, MoE MLA, MoE KDA
KDA_LAYER, MLA_LAYER, MOE_LAYER = 1, 3, 2


class Parts:
    def __init__(self, **changes):
        self.config = kernel_config(MODEL, dtype=jnp.float32, **changes)
        self.plan, self.named, self.slots = Plan(self.config), weights(MODEL), independent(self.config.rows)
        self.packed, self.caches = pack(self.plan, self.named), random_caches(self.plan)
        self.reference = reference._Step(self.named, self.config, lambda x: x, jnp.array(POSITION), self.slots)

    @property
    def x(self):
        """[B, D] in [-1, 1], made of integers: a kernel cannot capture arrays, and both sides get the same bits."""
        shape = (self.config.rows, self.config.hidden)
        row, lane = (jax.lax.broadcasted_iota(jnp.int32, shape, axis) for axis in (0, 1))
        return (jax.lax.rem(37 * lane * lane + 11 * row + 5 * lane, 101) - 50).astype(jnp.float32) / 64

    def layer(self, number: int) -> reference._Layer:
        return reference._Layer(jax.tree.map(jnp.asarray, self.named), number)

    def run(self, body) -> tuple[np.ndarray, reference.Caches]:
        """(the first `hidden` lanes of what each rank writes to `out.logits` [ranks, B, ...], caches)."""
        ranks = PartitionSpec(AXIS)

        def local(packed, caches):
            arrays = ({name: x[0] for name, x in group.items()} for group in (packed, caches))
            out, caches = call(self.plan, body, jnp.array(TOKEN), jnp.array(POSITION), self.slots, *arrays)
            return out["logits"][None], {name: x[None] for name, x in caches.items()}

        mesh = Mesh(np.array(jax.devices()), (AXIS,))
        program = jax.shard_map(local, mesh=mesh, in_specs=(ranks, ranks), out_specs=ranks, check_vma=False)
        logits, caches = jax.jit(program)(self.packed, to_ranks(self.plan, self.caches))
        return np.asarray(logits)[..., : self.config.hidden], from_ranks(self.plan, caches)

    def with_tiles(self, start: int, part, body):
        """A body that uses a part of the tape: its tiles come first, and those that are left over are awaited."""

        def run(core, ring, links, out):
            links.barrier()
            banks = self.config.blocks.banks
            core.buffers.residual[...] = jnp.zeros_like(core.buffers.residual)
            for tile in range(banks):
                ring.copy(start + tile).start()
            body(core, ring, links, jnp.int32(start))
            for tile in range(banks):
                ring.copy(start + part.tiles + tile).wait()
            out.logits[:, : self.config.hidden] = core.buffers.residual[...]

        return run

    # Parts; each gives pairs of arrays that should be equal.

    def ring(self):
        """Every matrix of the tape in its order, times ones; what comes out is added up."""
        tape, sums = self.plan.tape, self.config.layers

        def names(part):
            return list(dict.fromkeys(block.matrix.name for block in part.blocks))

        stretches = [(part, start) for kind, at in zip(sums, tape.starts, strict=True)
                     for part, start in zip(tape.parts(kind), at, strict=True)]  # fmt: skip
        stretches.append((tape.head, tape.head_start))

        def body(core, ring, links, out):
            ring.prime()
            total = jnp.zeros((self.config.rows, 1))
            for part, start in stretches:
                for name in names(part):
                    depth = part.of(name)[0].matrix.depth
                    y = ring.product(part, start, name, jnp.ones((self.config.rows, depth)))
                    total = total + jnp.sum(y, axis=1, keepdims=True)
            out.logits[...] = jnp.broadcast_to(total, out.logits.shape)

        have, _ = self.run(body)
        want = self.packed["tape"].astype(np.float64).sum((1, 2, 3))
        yield have[:, 0, 0], want

    def exchanges(self):
        """A sum, a gather and, with a cut cache, a different part to each: twice, so that buffers are used again."""
        c, ranks = self.config, np.arange(self.config.ranks)

        def body(core, ring, links, out):
            links.barrier()
            mine = jnp.float32(1) + core.rank
            total = jnp.zeros((c.rows, c.hidden))
            for _ in range(2):
                links.start_sum("mixer_sum", self.x * mine)
                total = total + links.finish_sum("mixer_sum", c.hidden)
                lanes = self.plan.exchanges["hidden"].shape[1]
                links.start("hidden", jnp.full((c.rows, lanes), mine))
                links.finish("hidden")
                total = total + links.whole("hidden", c.hidden)
                if c.cache_ranks > 1:
                    shape = self.plan.exchanges["contexts"].shape
                    links.start_each("contexts", [jnp.full(shape, 10.0 * mine + n) for n in range(c.ranks)])
                    buffer = links.finish("contexts")
                    total = total + sum(buffer[n, :1, :1] for n in range(c.ranks))
            out.logits[:, : c.hidden] = total

        have, _ = self.run(body)
        one = np.asarray(self.x) * (1 + ranks).sum() + np.repeat(1 + ranks, c.columns(c.hidden))[: c.hidden]
        to_each = (10 * (1 + ranks).sum() + c.ranks * ranks) if c.cache_ranks > 1 else 0 * ranks
        yield have, 2 * (one + to_each[:, None, None])

    def kda(self):
        tape, number = self.plan.tape, self.config.kda_layers.index(KDA_LAYER)
        count = len(self.config.kda_layers)

        def body(core, ring, links, start):
            kda._load(core, number, kda.START)
            kda._store(core, number - 1, kda.START)
            kda.mixer(core, ring, links, self.x, jnp.int32(number), start)
            core.buffers.residual[...] = links.finish_sum("mixer_sum", self.config.hidden)
            kda._load(core, number + 1, kda.WAIT)
            kda._store(core, number, kda.WAIT)

        assert 0 < number < count - 1
        have, caches = self.run(self.with_tiles(tape.starts[KDA_LAYER][0], tape.kda, body))
        want, after = self.reference.kda(self.layer(KDA_LAYER), self.x, self.caches, KDA_LAYER)
        yield have, np.broadcast_to(want, have.shape)
        yield caches.S[number], after.S[number]
        yield caches.conv[number], after.conv[number]

    def mla(self):
        tape, number = self.plan.tape, self.config.mla_layers.index(MLA_LAYER)

        def body(core, ring, links, start):
            vectors = core.load("vectors", MLA_LAYER)
            vectors.start()
            vectors.wait()
            mla.mixer(core, ring, links, self.x, core.buffers.vectors[MLA_LAYER % 2], number, start)
            core.buffers.residual[...] = links.finish_sum("mixer_sum", self.config.hidden)

        have, caches = self.run(self.with_tiles(tape.starts[MLA_LAYER][0], tape.mla, body))
        want, after = self.reference.mla(self.layer(MLA_LAYER), self.x, self.caches, MLA_LAYER)
        yield have, np.broadcast_to(want, have.shape)
        yield caches.latent, after.latent

    def moe(self):
        tape, number = self.plan.tape, self.config.moe_layers.index(MOE_LAYER)

        def body(core, ring, links, start):
            vectors = core.load("vectors", MOE_LAYER)
            vectors.start()
            vectors.wait()
            channels.latent_moe(core, ring, links, self.x, core.buffers.vectors[MOE_LAYER % 2], number, start)

        have, _ = self.run(self.with_tiles(tape.starts[MOE_LAYER][1], tape.moe, body))
        yield have, np.broadcast_to(self.reference.moe(self.layer(MOE_LAYER), self.x), have.shape)

    def dense(self):
        tape = self.plan.tape
        body = lambda core, ring, links, start: channels.dense(core, ring, links, self.x, start)  # noqa: E731
        have, _ = self.run(self.with_tiles(tape.starts[0][1], tape.dense, body))
        yield have, np.broadcast_to(self.reference.dense(self.layer(0), self.x), have.shape)

    def attn_res(self):
        """The second block's first two sites, over a bank of two rows."""
        site = 2 * self.config.attn_res_block + 1

        def bank():
            return [self.x, 2 - self.x * self.x]

        def body(core, ring, links, out):
            core.buffers.bank[...] = jnp.zeros_like(core.buffers.bank)
            core.load("keys", 0).start()
            core.load("keys", 0).wait()
            for block, row in enumerate(bank()):
                core.buffers.residual[...] = row
                attn_res.start_block(core, jnp.int32(block))
            core.buffers.residual[...] = self.x * 0.5 + 1.0
            out.logits[:, : self.config.hidden] = attn_res.mix(core, jnp.int32(site - 1))

        have, _ = self.run(body)
        layer, which = divmod(site, 2)
        w = self.layer(layer)
        name = ("attn_res", "ffn_res")[which]
        want = self.reference.mix(bank(), self.x * 0.5 + 1.0, w(f"{name}.norm") * w(f"{name}.query"))
        yield have, np.broadcast_to(want, have.shape)

    def embedding(self):
        def body(core, ring, links, out):
            links.barrier()
            head.embed(core, links)
            out.logits[:, : self.config.hidden] = core.buffers.residual[...]

        have, _ = self.run(body)
        yield have, np.broadcast_to(self.named["embed"][list(TOKEN)], have.shape)


NAMES = ("ring", "exchanges", "kda", "mla", "moe", "dense", "attn_res", "embedding")
CUT = ("exchanges", "mla", "moe")  # also with a cache that is cut over the ranks, and sums in slices


def largest_error(pairs) -> float:
    differences = [np.abs(np.asarray(a, np.float64) - np.asarray(b, np.float64)).max() for a, b in pairs]
    return float(max(differences))


def main() -> dict[str, float]:
    params = pltpu.InterpretParams(dma_execution_mode="on_wait", detect_races=True, on_race="raise")
    with pltpu.force_tpu_interpret_mode(params):
        whole, cut = Parts(), Parts(cache_ranks=4, blocks={"whole_sum_bytes": 0})
        errors = {name: largest_error(getattr(whole, name)()) for name in NAMES}
        errors |= {f"{name}-cut": largest_error(getattr(cut, name)()) for name in CUT}
    return errors


if __name__ == "__main__":
    print(json.dumps(main()))
