"""`k3 pack`: a checkpoint as the tapes of the decode kernel's ranks."""

import argparse
import errno
import shutil
import sys
import time
from pathlib import Path

from k3_jax.config import ConfigError

REMEDIES = {
    errno.ENOSPC: "the disk is full: free some of it and run the command again",
    errno.EACCES: "permission denied: expected a directory that can be written",
    errno.EROFS: "the file system is read-only: expected a directory that can be written",
}
SECONDS = 5  # between two lines of progress


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--checkpoint", required=True, type=Path, metavar="DIR",
        help="a training run (its newest step), one of its steps, or a directory in the released layout",
    )  # fmt: skip
    parser.add_argument(
        "--out", required=True, type=Path, metavar="DIR",
        help="new or empty, or what an interrupted run left: that is continued",
    )  # fmt: skip
    parser.add_argument("--ranks", required=True, type=int, metavar="N", help="TPU cores that will decode together")
    parser.add_argument(
        "--dtype", choices=("bfloat16", "float32"), default="bfloat16",
        help="of dense weights and activations; float32 is for tests (default: bfloat16)",
    )  # fmt: skip


def run(args: argparse.Namespace) -> int:
    from k3_jax.nn.pretrained import load_config
    from k3_jax.serve.packed import Cut
    from k3_jax.serve.packing import pack_checkpoint
    from k3_jax.serve.sources import open_checkpoint
    from k3_jax.weights.tokenizer import FILE_NAME

    config = load_config(args.checkpoint)
    cut = Cut(config, args.ranks, args.dtype)
    progress = Progress()
    try:
        cut.plan()
        packed = pack_checkpoint(open_checkpoint(args.checkpoint, config), cut, args.out, progress)
        if (args.checkpoint / FILE_NAME).is_file():
            shutil.copyfile(args.checkpoint / FILE_NAME, args.out / FILE_NAME)
    except OSError as error:
        if error.errno not in REMEDIES:
            raise
        raise ConfigError(f"--out = {args.out}: {REMEDIES[error.errno]}") from None
    size = f"{progress.size / 2**30:.2f} GiB" if progress.size else "packed before"
    print(f"{packed.directory}: {args.ranks} ranks, {size}")
    return 0


class Progress:
    """Lines on stderr, one in a few seconds."""

    def __init__(self):
        self.size, self._began, self._last = 0, time.monotonic(), time.monotonic()
        self._first: int | None = None

    def __call__(self, section: str, done: int, size: int) -> None:
        now = time.monotonic()
        if self._first is None:
            self._first = done
        self.size = size
        if now - self._last < SECONDS and done < size:
            return
        self._last, rate = now, (done - self._first) / max(now - self._began, 1e-9)
        left = f", {(size - done) / rate:.0f} s left" if rate else ""
        gib = f"{done / 2**30:.2f} of {size / 2**30:.2f} GiB"
        print(f"k3 pack: {section}: {gib}{left}", file=sys.stderr, flush=True)
