"""The training run: set up, restore or start, step, report, save; stop cleanly when told to.

Everything that decides the next step is in the checkpoint or in the configuration, so a run that is killed and started
again takes the same steps, bit for bit on the same mesh.
"""

import contextlib
import dataclasses
import json
import math
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from k3_jax import sharding
from k3_jax.config import ConfigError, DataConfig, RunConfig
from k3_jax.mesh import make_mesh
from k3_jax.nn.pretrained import load_config, load_model
from k3_jax.nn.transformer import K3
from k3_jax.overrides import differences, from_json, to_json
from k3_jax.train import ngram
from k3_jax.train.checkpoint import Checkpoints
from k3_jax.train.corpus import Corpus, make_corpus
from k3_jax.train.data import Batches, iter_eval_batches
from k3_jax.train.packing import Batch
from k3_jax.train.report import Reporter, plot_losses
from k3_jax.train.state import TrainState, new_model, start
from k3_jax.train.step import make_eval_step, make_train_step, micro_batches
from k3_jax.weights.tokenizer import ByteTokenizer, load_tokenizer

# Fields that do not change the steps: a working directory may be continued with other values of these.
FREE = (
    "mesh.",
    "train.checkpoint_every",
    "train.keep",
    "train.log_every",
    "train.eval_every",
    "train.eval_batches",
    "train.max_bad_steps",
    "train.loss_chunk",
)


# Orbax raises ValueError where tensorstore reports a full disk.
SAVE_ERRORS = (OSError, ValueError, RuntimeError)


class TrainingError(RuntimeError):
    """The run cannot go on; the message says why and what was kept."""


@dataclass(frozen=True)
class Stage:
    """A context-length stage: from step `first` on, with its own row length and batch size."""

    number: int
    first: int
    data: DataConfig


def stages_of(run: RunConfig) -> list[Stage]:
    """Tokens per batch stay the same, so longer rows mean fewer of them."""
    tokens, stages = run.data.batch_size * run.data.sequence_length, [Stage(0, 0, run.data)]
    for number, stage in enumerate(run.train.context_stages, start=1):
        length = stage.sequence_length
        data = dataclasses.replace(run.data, sequence_length=length, batch_size=tokens // length)
        stages.append(Stage(number, round(stage.start * run.train.steps), data))
    return stages


def train(run: RunConfig, workdir: Path, init: Path | None = None) -> int:
    """Run to the end, or until SIGTERM or Ctrl-C; returns the last finished step.

    Raises ConfigError for a mistake in the configuration, TrainingError where the run itself failed.
    """
    mesh = make_mesh(run.mesh)
    check_batch(run, mesh)
    corpora = read_corpora(run)
    claim(workdir, run)
    with jax.set_mesh(mesh), Checkpoints(workdir, run.train.keep, run.model) as checkpoints:
        state = restore_or_start(run, checkpoints, init)
        session = Session(run, workdir, checkpoints, corpora, Reporter(workdir, run.train.steps, int(state.step)))
        try:
            return session.run_all(state)
        finally:
            session.reporter.close()


def check_batch(run: RunConfig, mesh: jax.sharding.Mesh) -> None:
    """Every micro-batch of every stage must split evenly over the batch axes of the mesh."""
    shards = math.prod(mesh.shape[axis] for axis in sharding.ACTIVE["B"])
    for stage in stages_of(run):
        rows = stage.data.batch_size // run.train.grad_accumulation
        if rows % shards:
            raise ConfigError(
                f"data.batch_size = {run.data.batch_size}: expected micro-batches (here {rows} rows of "
                f"{stage.data.sequence_length} tokens) that split over the {shards} batch shards of the mesh"
            )


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
    """Write config.json, or check that the run that is there has the same configuration."""
    path = workdir / "config.json"
    if path.exists():
        before = from_json(RunConfig, json.loads(path.read_text()))
        changed = [line for line in differences(before, run) if not line.startswith(FREE)]
        if changed:
            raise ConfigError(
                f"--workdir {workdir}: holds a run with another configuration: {'; '.join(changed)}; "
                "use another --workdir (and --init to start from these weights)"
            )
        return
    try:
        workdir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--workdir {workdir}: cannot be made ({error.strerror})") from error
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(to_json(run), indent=1))
    temporary.replace(path)


def restore_or_start(run: RunConfig, checkpoints: Checkpoints, init: Path | None) -> TrainState:
    """The newest checkpoint; else the weights of `init` with a fresh optimizer; else a new model."""
    latest = checkpoints.latest()
    if latest is not None:
        like = jax.eval_shape(lambda: start(run, new_model(run)))
        return checkpoints.restore(like, latest)[0]
    if init is None:
        return start(run, new_model(run))
    changed = differences(to_json(load_config(init)), to_json(run.model))
    if changed:
        raise ConfigError(f"--init {init}: another architecture: {'; '.join(changed)}")
    return jax.jit(lambda model: start(run, model), donate_argnums=0)(load_model(init, np.float32))


def put(batch: Batch, spec: PartitionSpec) -> Batch:
    """This host's rows as global arrays."""
    layout = NamedSharding(jax.sharding.get_mesh(), spec)
    return Batch(*(jax.make_array_from_process_local_data(layout, x) for x in batch))


@contextlib.contextmanager
def stop_signal() -> Iterator[Callable[[], str | None]]:
    """The name of the signal that asked to stop, or None. A second one of the same kind ends the process at once."""
    received: list[str] = []

    def remember(number, frame):
        received.append(signal.Signals(number).name)
        signal.signal(number, signal.SIG_DFL)

    before = {number: signal.signal(number, remember) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: received[0] if received else None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Session:
    """A run in progress: the compiled steps and where things are written."""

    def __init__(self, run: RunConfig, workdir: Path, checkpoints: Checkpoints, corpora, reporter: Reporter):
        self.run, self.workdir, self.checkpoints, self.reporter = run, workdir, checkpoints, reporter
        self.train_corpus, self.held_out = corpora
        self.train_step, self.eval_step = make_train_step(run), make_eval_step(run)

    def run_all(self, state: TrainState) -> int:
        self.announce(state)
        step = int(state.step)
        with stop_signal() as stop:
            for stage, following in zip(stages := stages_of(self.run), [*stages[1:], None], strict=True):
                end = following.first if following else self.run.train.steps
                if step < end:
                    state = self.run_stage(state, stage, end, stop)
                    step = int(state.step)
                if stop():
                    break
            self.save(state)
            self.finish_saving(step)
            if stop():
                self.reporter.say(f"{stop()}: saved step {step}; the same command continues from there")
            else:
                self.evaluate(state, step)
        picture = plot_losses(self.workdir)
        self.reporter.say(f"step {step}: checkpoint {self.checkpoints.directory / str(step)}, picture {picture}")
        return step

    def announce(self, state: TrainState) -> None:
        count = sum(x.size for x in jax.tree.leaves(state.model))
        self.reporter.say(
            f"{self.run.name}: {count:,} parameters, {self.train_corpus.tokens.size:,} training tokens, "
            f"step {int(state.step)}/{self.run.train.steps}; compiling"
        )
        if int(state.step) == 0 and self.run.model.vocab_size <= 512:
            order = ngram.fit(self.train_corpus, self.run.model.vocab_size)
            scores = ngram.nats_per_token(order, self.eval_batches())
            self.reporter.write(0, ngram=scores)
            self.reporter.say("held-out nats per token: " + ", ".join(f"{k} {v:.4f}" for k, v in scores.items()))

    def run_stage(self, state: TrainState, stage: Stage, end: int, stop) -> TrainState:
        train, host = self.run.train, jax.process_index()
        batches = Batches(self.train_corpus, stage.data, host, jax.process_count(), stage.number)
        step = int(state.step)
        tokens = stage.data.batch_size * stage.data.sequence_length
        spec = PartitionSpec(None, *sharding.active("BT"))
        source = batches.from_position((step - stage.first) * stage.data.batch_size)
        last, since = time.monotonic(), step
        with contextlib.closing(source):
            for batch in source:
                state, metrics = self.train_step(state, put(micro_batches(batch, train.grad_accumulation), spec))
                step += 1
                metrics = {name: value.item() for name, value in jax.device_get(metrics).items()}
                self.check(metrics, step)
                if step % train.log_every == 0 or step == end:
                    now = time.monotonic()
                    metrics["tokens_per_s"] = (step - since) * tokens / (now - last)
                    last, since = now, step
                    self.reporter.write(step, **metrics)
                    self.reporter.progress(step, metrics)
                if step % train.eval_every == 0 and step < train.steps:
                    self.evaluate(state, step)
                    last, since = time.monotonic(), step
                if step % train.checkpoint_every == 0 and step < train.steps:
                    self.save(state)
                if step >= end or stop():
                    return state
        raise AssertionError("the order of samples is endless")

    def check(self, metrics: dict[str, Any], step: int) -> None:
        """Report a skipped step; too many in a row end the run, whose last good checkpoint stays."""
        bad, limit = int(metrics["bad_in_row"]), self.run.train.max_bad_steps
        if not bad:
            return
        self.reporter.say(f"step {step}: loss {metrics['loss']}, gradient norm {metrics['grad_norm']}: skipped")
        self.reporter.write(step, **{k: v if np.isfinite(v) else str(v) for k, v in metrics.items()})
        if bad >= limit:
            raise TrainingError(
                f"step {step}: the loss or the gradient was not finite {bad} times in a row (train.max_bad_steps = "
                f"{limit}); the newest checkpoint is step {self.checkpoints.latest()}. Lower "
                "optimizer.learning_rate, or look at the data of these steps"
            )

    def eval_batches(self) -> Iterator[Batch]:
        return iter_eval_batches(
            self.held_out, self.run.data, self.run.train.eval_batches, jax.process_index(), jax.process_count()
        )

    def evaluate(self, state: TrainState, step: int) -> None:
        loss = held_out_loss(self.eval_step, state.model, self.eval_batches())
        self.reporter.write(step, held_out_loss=loss)
        self.reporter.say(f"step {step}: held-out loss {loss:.4f} nats per token")

    def save(self, state: TrainState) -> None:
        """A failed save (a full disk, say) is reported and the run goes on: the checkpoints before it stay."""
        step = int(state.step)
        try:
            self.checkpoints.wait()
        except SAVE_ERRORS as error:
            self.report_failed_save("the save before", error)
        try:
            self.checkpoints.save(state, {"config": to_json(self.run), "data": self.train_corpus.fingerprint})
        except SAVE_ERRORS as error:
            self.report_failed_save(f"step {step}", error)

    def report_failed_save(self, what: str, error: Exception) -> None:
        self.checkpoints.remove_unfinished()
        newest = self.checkpoints.latest()
        self.reporter.say(f"{what}: checkpoint not written ({first_line(error)}); the newest is step {newest}")

    def finish_saving(self, step: int) -> None:
        try:
            self.checkpoints.wait()
        except SAVE_ERRORS as error:
            self.report_failed_save(f"step {step}", error)
        if self.checkpoints.latest() != step:
            raise TrainingError(
                f"step {step}: the last checkpoint was not written; the newest is step {self.checkpoints.latest()}, "
                "from which the same command continues"
            )


def first_line(error: Exception) -> str:
    return str(error).split("\n", 1)[0][:200]


def held_out_loss(eval_step, model: K3, batches: Iterator[Batch]) -> float:
    """Nats per token over all targets of `batches`."""
    total, count = 0.0, 0
    for batch in batches:
        nats, targets = eval_step(model, put(batch, sharding.active("BT")))
        total, count = total + float(nats), count + int(targets)
    return total / max(count, 1)
