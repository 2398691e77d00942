"""Before the first step: check the run, read its data, claim the working directory, restore or start.

Everything that a user can have got wrong is found before anything is written.
"""

import contextlib
import dataclasses
import fcntl
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh

from k3_jax import sharding
from k3_jax.config import ConfigError, DataConfig, K3Config, RunConfig
from k3_jax.nn.grouping import Depth
from k3_jax.nn.pretrained import load_config, load_model
from k3_jax.overrides import differences, from_json, to_json
from k3_jax.parallel.fragments import FRAGMENTS
from k3_jax.train.checkpoint import Checkpoints
from k3_jax.train.corpus import Corpus, make_corpus
from k3_jax.train.data import Batches
from k3_jax.train.schedule import learning_rate
from k3_jax.train.state import TrainState, new_model, start
from k3_jax.weights.orbax import find_step, read_run
from k3_jax.weights.tokenizer import ByteTokenizer, load_tokenizer

# Fields that a run may be continued with other values of: they change no step, but for the rounding of sums.
FREE = (
    "mesh.",
    "train.checkpoint_every",
    "train.keep",
    "train.log_every",
    "train.eval_every",
    "train.eval_batches",
    "train.max_bad_steps",
    "train.loss_chunk",
    "train.tpu_options",
)
# Fields of a model that say nothing about its weights or what is computed from them.
INIT_FREE = ("init_std", "max_positions", "moe.quantile_bins", "bos_token_id", "eos_token_id", "pad_token_id")


@dataclass(frozen=True)
class Stage:
    """A context-length stage: from step `first` on, with its own row length and batch size."""

    number: int
    first: int
    data: DataConfig

    def position(self, step: int) -> int:
        """Samples of this stage consumed before `step`."""
        return (step - self.first) * self.data.batch_size

    def batches(self, corpus: Corpus) -> Batches:
        return Batches(corpus, self.data, stage=self.number)


def stages_of(run: RunConfig) -> list[Stage]:
    """Tokens per batch stay the same, so longer rows mean fewer of them."""
    tokens, stages = run.data.batch_size * run.data.sequence_length, [Stage(0, 0, run.data)]
    for number, stage in enumerate(run.train.context_stages, start=1):
        length = stage.sequence_length
        data = dataclasses.replace(run.data, sequence_length=length, batch_size=tokens // length)
        stages.append(Stage(number, round(stage.start * run.train.steps), data))
    return stages


def stage_at(run: RunConfig, step: int) -> Stage:
    """The stage of the batch that comes after `step` batches."""
    return [stage for stage in stages_of(run) if stage.first <= step][-1]


def check_run(run: RunConfig, mesh: Mesh | AbstractMesh, init: Path | None) -> None:
    """Raises ConfigError for what the configuration alone, or the weights to start from, show to be wrong."""
    if jax.process_count() > 1:
        raise ConfigError(
            f"jax.process_count() = {jax.process_count()}: training on several hosts is not supported yet"
        )
    learning_rate(run.optimizer, run.train.steps)
    shards = math.prod(mesh.shape[axis] for axis in sharding.ACTIVE["B"])
    for stage in stages_of(run):
        rows = stage.data.batch_size // run.train.grad_accumulation
        if rows % shards:
            raise ConfigError(
                f"data.batch_size = {run.data.batch_size}: expected micro-batches (here {rows} rows of "
                f"{stage.data.sequence_length} tokens) that split over the {shards} batch shards of the mesh"
            )
        check_fragments(stage.data.sequence_length, mesh)
    check_splits(run.model, mesh)
    Depth(run.model, mesh.shape["pipe"], run.mesh.interleave)
    if init is not None:
        changed = [line for line in differences(load_config(init), run.model) if not line.startswith(INIT_FREE)]
        if changed:
            raise ConfigError(f"--init {init}: another architecture: {'; '.join(changed)}")


def check_fragments(length: int, mesh: Mesh | AbstractMesh) -> None:
    """Raises ConfigError for rows that the ranks of an axis cannot cut into equal fragments."""
    for axis, fragments in FRAGMENTS.items():
        ranks = mesh.shape[axis]
        if ranks > 1 and length % (ranks * fragments):
            raise ConfigError(
                f"sequence_length = {length}: expected a multiple of {ranks * fragments}, the fragments of a row "
                f"where mesh.{axis} = {ranks}"
            )


def check_splits(model: K3Config, mesh: Mesh | AbstractMesh) -> None:
    """Raises ConfigError for a size that the mesh axis of its letter does not divide."""
    sizes = [
        ("O", "vocab_size"),
        ("D", "hidden_size"),
        ("H", "kda.num_heads"),
        ("H", "mla.num_heads"),
        ("F", "dense_dim"),
    ]
    if model.moe:
        sizes += [("E", "moe.num_experts"), ("L", "moe.latent_dim"), ("F", "moe.expert_dim"), ("F", "moe.shared_dim")]
    for letter, name in sizes:
        axes, size = sharding.STORED[letter], attrgetter(name)(model)
        shards = math.prod(mesh.shape[axis] for axis in axes)
        if size % shards:
            named = " x ".join(f"mesh.{axis}" for axis in axes)
            raise ConfigError(f"model.{name} = {size}: expected a multiple of {named} = {shards}")


def read_corpora(run: RunConfig) -> tuple[Corpus, Corpus]:
    """(training, held-out) documents as tokens that the model has embeddings for."""
    name = None if run.data.tokenizer == "bytes" else run.data.tokenizer
    tokenizer = load_tokenizer(name, run.model.vocab_size)
    plain = isinstance(tokenizer, ByteTokenizer)
    encode, eos = (None, None) if plain else (tokenizer.encode, run.model.eos_token_id)
    train, held_out = (make_corpus(run.data, split, encode, eos) for split in ("train", "held_out"))
    train.require_vocabulary(run.model.vocab_size)
    held_out.require_vocabulary(run.model.vocab_size)
    return train, held_out


def claim(workdir: Path, run: RunConfig) -> None:
    """Write config.json, unless the directory holds a checkpoint of a run with another configuration."""
    step = find_step(workdir)
    if step is not None:
        before = from_json(RunConfig, read_run(step)["config"])
        changed = [line for line in differences(before, run) if not line.startswith(FREE)]
        if changed:
            raise ConfigError(
                f"--workdir {workdir}: holds a run with another configuration: {'; '.join(changed)}; "
                "use another --workdir (and --init to start from these weights)"
            )
    path = workdir / "config.json"
    try:
        workdir.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(".tmp")
        temporary.write_text(json.dumps(to_json(run), indent=1))
        temporary.replace(path)
    except OSError as error:
        raise ConfigError(f"--workdir {workdir}: cannot be written ({error.strerror})") from error


@contextlib.contextmanager
def locked(workdir: Path) -> Iterator[None]:
    """Only one process trains in a directory. The system frees the lock of a process that dies."""
    with (workdir / ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"--workdir {workdir}: another k3 train is running in it") from None
        yield


def restore_or_start(run: RunConfig, checkpoints: Checkpoints, corpus: Corpus, init: Path | None) -> TrainState:
    """The newest checkpoint; else the weights of `init` with a fresh optimizer; else a new model.

    Raises ConfigError if the checkpoint was trained on other data: the next samples would not be the next.
    """
    latest = checkpoints.latest()
    if latest is None and init is None:
        return start(run, new_model(run))
    if latest is None:
        model = load_model(init, jnp.float32, run.mesh.interleave)
        return jax.jit(lambda model: start(run, model), donate_argnums=0)(model)
    state, saved = checkpoints.restore(jax.eval_shape(lambda: start(run, new_model(run))), latest)
    stage_at(run, latest).batches(corpus).resume(saved["data"])
    return state
