"""What a run tells: metrics.jsonl, TensorBoard events, a progress line, and loss.png."""

import json
import sys
import time
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from tensorboardX import SummaryWriter


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The complete lines of a metrics file; a line that a kill cut short is left out."""
    rows = []
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            rows.append(json.loads(line))
        except ValueError:
            break
    return rows


class Reporter:
    """One line of `metrics.jsonl` per event, each with its `step`. `resume_at` drops what is newer than the checkpoint
    that the run continues from, so that every step stands in the file once."""

    def __init__(self, workdir: Path, total_steps: int, resume_at: int):
        self.path = workdir / "metrics.jsonl"
        self.total_steps = total_steps
        rows = [row for row in read_metrics(self.path) if row["step"] <= resume_at]
        self.path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        self._file = self.path.open("a")
        self._events = SummaryWriter(str(workdir / "tensorboard"), purge_step=resume_at + 1)
        self._started, self._first = time.monotonic(), resume_at

    def write(self, step: int, **values: Any) -> None:
        try:
            self._file.write(json.dumps({"step": step} | values) + "\n")
            self._file.flush()
            for name, value in values.items():
                if isinstance(value, (int, float)):
                    self._events.add_scalar(name, value, step)
        except OSError as error:  # a full disk: the run is worth more than its log
            self.say(f"step {step}: metrics not written ({error})")

    def progress(self, step: int, metrics: dict[str, float]) -> None:
        elapsed = time.monotonic() - self._started
        left = elapsed / max(step - self._first, 1) * (self.total_steps - step)
        self.say(
            f"step {step}/{self.total_steps}  loss {metrics['loss']:.4f}  grad {metrics['grad_norm']:.3f}  "
            f"lr {metrics['learning_rate']:.2e}  {metrics['tokens_per_s']:,.0f} tokens/s  "
            f"{left // 60:.0f}m{left % 60:02.0f}s left"
        )

    def say(self, text: str) -> None:
        """A line for the person who watches; a terminal that has gone away does not end the run."""
        try:
            print(text, file=sys.stderr, flush=True)
        except OSError:
            pass

    def close(self) -> None:
        self._file.close()
        self._events.close()


def plot_losses(workdir: Path) -> Path:
    """loss.png: training loss, held-out loss, and the n-gram models as horizontal lines, in nats per token."""
    rows = read_metrics(workdir / "metrics.jsonl")
    figure, axes = plt.subplots(figsize=(8, 5))
    for name, style in (("loss", {"alpha": 0.5}), ("held_out_loss", {"marker": "o"})):
        points = [(row["step"], row[name]) for row in rows if name in row]
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
