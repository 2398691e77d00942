"""What benchmarks print and write."""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from k3_jax.config import ConfigError

STDOUT = "-"
PICTURES = (".png", ".pdf", ".svg")
DIRECTIONS = ("forward", "forward_backward")


def add_json_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--json",
        nargs="?",
        const=STDOUT,
        metavar="FILE",
        help="write the numbers as JSON too; without a name, or to -, print them instead of tables",
    )


def check_json_argument(place: str | None) -> None:
    if place not in (None, STDOUT):
        check_file("json", place)


def check_file(option: str, place: str) -> None:
    """Before anything is measured. Raises ConfigError if the file cannot be one."""
    path = Path(place).absolute()
    if path.is_dir() or not os.access(path.parent, os.W_OK):
        raise ConfigError(f"--{option} = {place}: expected a file in a folder that can be written to")


def check_picture(place: str | None) -> None:
    """Of `--plot`."""
    if place is None:
        return
    check_file("plot", place)
    if Path(place).suffix not in PICTURES:
        raise ConfigError(f"--plot = {place}: expected a name that ends in {', '.join(PICTURES)}")


def publish(place: str | None, numbers: dict[str, Any], text: str) -> None:
    """The text to stdout and the numbers to the file, or the numbers alone to stdout."""
    if place == STDOUT:
        print(json.dumps(numbers))
        return
    if place:
        Path(place).write_text(json.dumps(numbers, indent=2) + "\n")
    print(text)


def progress(text: str) -> None:
    print(f"k3 bench: {text}", file=sys.stderr, flush=True)


def columns(rows: Sequence[Sequence[str]]) -> str:
    """Lines of columns, the first to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])] for row in rows)
    return "\n".join("  ".join(line).rstrip() for line in lines)


def integers(text: str) -> tuple[int, ...]:
    """The type of an argument such as 1,512,2,64."""
    try:
        return tuple(int(word) for word in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: expected integers with commas between them") from None


PREDICTED = ("", "bundles/token/head", "HBM MB", "MXU", "fill", "spill", "predicted ms")


def predicted_row(name: str, x: dict[str, float | None]) -> tuple[str, ...]:
    """The cells under `PREDICTED`."""
    shares = (f"{100 * x[f'{slot}_share']:.0f} %" for slot in ("mxu", "fill", "spill"))
    predicted = "-" if x["predicted_ms"] is None else f"{x['predicted_ms']:.3f}"
    return name, f"{x['bundles_per_token_head']:.2f}", f"{x['hbm_mb']:.0f}", *shares, predicted
