"""What a run tells: metrics.jsonl, TensorBoard events, a progress line, and loss.png."""

import contextlib
import json
import math
import sys
import time
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.summary import scalar


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The complete lines of a metrics file; a line that a kill or a full disk cut short is left out."""
    rows = []
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            rows.append(json.loads(line))
        except ValueError:
            continue
    return rows


class Reporter:
    """One line of `metrics.jsonl` per event, each with its `step`. `resume_at` drops what is newer than the checkpoint
    that the run continues from, so that every step stands in the file once. A value that is not finite is null."""

    def __init__(self, workdir: Path, total_steps: int, resume_at: int):
        self.total_steps, path = total_steps, workdir / "metrics.jsonl"
        rows = [row for row in read_metrics(path) if row["step"] <= resume_at] if resume_at else []
        temporary = path.with_suffix(".tmp")
        temporary.write_text("".join(json.dumps(row) + "\n" for row in rows))
        temporary.replace(path)
        self._file = path.open("ab", buffering=0)  # nothing stays behind in a buffer when a line fails
        (workdir / "tensorboard").mkdir(exist_ok=True)
        # Written here and now: tensorboardX's own thread dies of a full disk, and its queue then blocks the run.
        self._events = EventsWriter(str(workdir / "tensorboard" / "events"))
        restart = SessionLog(status=SessionLog.START)
        self._events.write_event(Event(wall_time=time.time(), step=resume_at + 1, session_log=restart))
        self._started: tuple[int, float] | None = None

    def write(self, step: int, **values: Any) -> None:
        finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}
        try:
            self._file.write((json.dumps({"step": step} | finite) + "\n").encode())
            for name, value in finite.items():
                if isinstance(value, (int, float)):
                    self._events.write_event(Event(wall_time=time.time(), step=step, summary=scalar(name, value)))
            self._events.flush()
        except OSError as error:  # a full disk: the run is worth more than its log
            self.say(f"step {step}: metrics not written ({error.strerror})")

    def progress(self, step: int, metrics: dict[str, float], rate: float | None) -> None:
        now = time.monotonic()
        self._started = self._started or (step, now)
        done = step - self._started[0]
        left = (now - self._started[1]) / done * (self.total_steps - step) if done else None
        self.say(
            f"step {step}/{self.total_steps}  loss {metrics['loss']:.4f}  grad {metrics['grad_norm']:.3f}  "
            f"lr {metrics['learning_rate']:.2e}"
            + (f"  {rate:,.0f} tokens/s" if rate else "")
            + (f"  {left // 60:.0f}m{left % 60:02.0f}s left" if left is not None else "")
        )

    def say(self, text: str) -> None:
        """A line for the person who watches; a terminal that has gone away does not end the run."""
        try:
            print(text, file=sys.stderr, flush=True)
        except OSError:
            pass

    def close(self) -> None:
        with contextlib.suppress(OSError):  # a full disk must not hide how the run ended
            self._file.close()
            self._events.close()


def plot_losses(workdir: Path) -> Path:
    """loss.png: training loss, held-out loss, and the n-gram models as horizontal lines, in nats per token."""
    rows = read_metrics(workdir / "metrics.jsonl")
    figure, axes = plt.subplots(figsize=(8, 5))
    for name, style in (("loss", {"alpha": 0.5}), ("held_out_loss", {"marker": "o"})):
        points = [(row["step"], row[name]) for row in rows if row.get(name) is not None]
        if points:
            axes.plot(*zip(*points, strict=True), label=name.replace("_", " "), **style)
    baselines = next((row["ngram"] for row in rows if "ngram" in row), {})
    for index, (name, value) in enumerate(baselines.items()):
        axes.axhline(value, linestyle="--", color=f"C{index + 2}", label=f"{name} {value:.3f}")
    axes.set(xlabel="step", ylabel="nats per token")
    axes.legend()
    figure.tight_layout()
    path = workdir / "loss.png"
    figure.savefig(path.with_suffix(".tmp.png"), dpi=120)
    plt.close(figure)
    path.with_suffix(".tmp.png").replace(path)
    return path
