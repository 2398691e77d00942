"""The training run: set up, restore or start, step, report, save; stop cleanly when told to.

Everything that decides the next step is in the checkpoint or in the configuration, so a run that is killed and started
again takes the same steps, bit for bit on the same mesh.
"""

import contextlib
import dataclasses
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
from jax.sharding import NamedSharding, PartitionSpec

from k3_jax import sharding
from k3_jax.config import RunConfig
from k3_jax.mesh import make_mesh
from k3_jax.nn.layout import abstract_layers
from k3_jax.nn.transformer import K3
from k3_jax.overrides import to_json
from k3_jax.train import ngram
from k3_jax.train.checkpoint import Checkpoints
from k3_jax.train.data import iter_eval_batches
from k3_jax.train.packing import Batch
from k3_jax.train.report import Reporter, plot_losses
from k3_jax.train.setup import Stage, check_run, claim, locked, read_corpora, restore_or_start, stage_at, stages_of
from k3_jax.train.state import TrainState
from k3_jax.train.step import make_eval_step, make_train_step, micro_batches

# Orbax raises ValueError where tensorstore reports a full disk.
SAVE_ERRORS = (OSError, ValueError, RuntimeError)


class TrainingError(RuntimeError):
    """The run cannot go on; the message says why and what was kept."""


def train(run: RunConfig, workdir: Path, init: Path | None = None) -> int:
    """Run to the end, or until SIGTERM or Ctrl-C; returns the last finished step.

    Raises ConfigError for a mistake in the configuration, TrainingError where the run itself failed.
    """
    mesh = make_mesh(run.mesh)
    check_run(run, mesh, init)
    corpora = read_corpora(run)
    claim(workdir, run)
    with locked(workdir), jax.set_mesh(mesh), Checkpoints(workdir, run.train.keep) as checkpoints:
        state = restore_or_start(run, checkpoints, corpora[0], init)
        if int(state.step) >= run.train.steps:
            print(f"{workdir}: the run is finished (step {int(state.step)})", file=sys.stderr)
            return int(state.step)
        session = Session(run, workdir, checkpoints, corpora, Reporter(workdir, run.train.steps, int(state.step)))
        try:
            return session.run_all(state)
        finally:
            session.reporter.close()


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


class Clock:
    """Tokens per second since the last mark, without compilation and evaluation."""

    def __init__(self, tokens_per_step: int):
        self.tokens = tokens_per_step
        self.restart()

    def restart(self) -> None:
        self._since: tuple[int, float] | None = None  # the next tick starts the clock

    def tick(self, step: int, mark: bool) -> None:
        if mark or self._since is None:
            self._since = (step, time.monotonic())

    def rate(self, step: int) -> float | None:
        if self._since is None:
            return None
        return (step - self._since[0]) * self.tokens / (time.monotonic() - self._since[1])


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
            if step < self.run.train.steps:
                self.reporter.say(f"{stop()}: saved step {step}; the same command continues from there")
            else:
                self.evaluate(state, step)
        self.reporter.say(f"step {step}: checkpoint {self.checkpoints.directory / str(step)}")
        try:
            self.reporter.say(f"picture {plot_losses(self.workdir)}")
        except OSError as error:
            self.reporter.say(f"picture not drawn ({error.strerror})")
        return step

    def announce(self, state: TrainState) -> None:
        count = sum(x.size for x in abstract_layers(state.model, state.model.depth).values())
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
        train, step = self.run.train, int(state.step)
        tokens = stage.data.batch_size * stage.data.sequence_length
        spec = PartitionSpec(None, *sharding.active("BT"))
        source = stage.batches(self.train_corpus).from_position(stage.position(step))
        clock = Clock(tokens)
        with contextlib.closing(source):
            for batch in source:
                state, metrics = self.train_step(state, put(micro_batches(batch, train.grad_accumulation), spec))
                step += 1
                metrics = {name: value.item() for name, value in jax.device_get(metrics).items()}
                bad = int(metrics["bad_in_row"])
                if bad or step % train.log_every == 0 or step == end:
                    self.reporter.write(step, **metrics, tokens_per_s=clock.rate(step))
                    self.reporter.progress(step, metrics, clock.rate(step))
                self.check(bad, step)
                if step % train.eval_every == 0 and step < train.steps:
                    self.evaluate(state, step)
                    clock.restart()
                if step % train.checkpoint_every == 0 and step < train.steps and not bad:
                    self.save(state)
                clock.tick(step, step % train.log_every == 0)
                if step >= end or stop():
                    return state
        raise AssertionError("the order of samples is endless")

    def check(self, bad: int, step: int) -> None:
        """Report a skipped step; too many in a row end the run, whose last good checkpoint stays."""
        limit = self.run.train.max_bad_steps
        if bad:
            self.reporter.say(f"step {step}: the loss or the gradient is not finite: skipped")
        if bad >= limit:
            raise TrainingError(
                f"step {step}: the loss or the gradient was not finite {bad} times in a row (train.max_bad_steps = "
                f"{limit}); the newest checkpoint is step {self.checkpoints.latest()}. Lower "
                "optimizer.learning_rate, or look at the data of these steps"
            )

    def eval_batches(self) -> Iterator[Batch]:
        """Held-out rows, as many at a time as a micro-batch of training holds."""
        data, count = self.run.data, self.run.train.grad_accumulation
        micro = dataclasses.replace(data, batch_size=data.batch_size // count)
        return iter_eval_batches(self.held_out, micro, self.run.train.eval_batches * count)

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
        if self.checkpoints.latest() == step:
            return
        stage = stage_at(self.run, step)
        data = stage.batches(self.train_corpus).state(stage.position(step))
        try:
            self.checkpoints.save(state, {"config": to_json(self.run), "data": data})
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
