"""`k3 generate`: a prompt's continuation, as a stream of text or as JSON."""

import argparse
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from k3_jax.config import ConfigError, K3Config
from k3_jax.serve.inputs import add_model_arguments, check_vocabulary, compute_dtype, read_tokens

if TYPE_CHECKING:
    from k3_jax.serve.decode import Completion
    from k3_jax.serve.sampling import SamplingConfig
    from k3_jax.weights.tokenizer import AnyTokenizer

STEPS = 8  # per call of the device: text comes in bursts of so many tokens


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser)
    prompt = parser.add_mutually_exclusive_group(required=True)
    prompt.add_argument("--prompt", metavar="TEXT", help="the text to continue; only what follows it is printed")
    prompt.add_argument("--prompt-tokens", type=Path, metavar="FILE", help=".npy of token ids, [T] or [1, T]")
    parser.add_argument("--max-tokens", type=int, default=256, metavar="N", help="(default: 256)")
    parser.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0 is greedy (default: 0)")
    parser.add_argument("--top-p", type=float, default=1.0, metavar="P", help="in (0, 1]; 1 is off (default: 1)")
    parser.add_argument("--top-k", type=int, default=0, metavar="K", help="0 is off (default: 0)")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="(default: 0)")
    parser.add_argument(
        "--stop-token", type=int, action="append", default=[], metavar="ID",
        help="ends the text, as the model's own end token does; may be given several times",
    )  # fmt: skip
    parser.add_argument("--ignore-eos", action="store_true", help="go on after the model's own end token")
    parser.add_argument("--tokenizer", type=Path, metavar="FILE", help="a tiktoken.model (default: the checkpoint's)")
    parser.add_argument(
        "--engine", default="xla", metavar="xla|megakernel",
        help="what runs the model; megakernel is for TPUs, on a CPU it is interpreted, slowly; --checkpoint is then "
        "what k3 pack wrote (default: xla)",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a stream of text")


def run(args: argparse.Namespace) -> int:
    _check(args)
    ids = None if args.prompt_tokens is None else _prompt_ids(args.prompt_tokens)
    from k3_jax.serve.decode import complete
    from k3_jax.serve.sampling import SamplingConfig

    sampling = SamplingConfig(args.temperature, args.top_k, args.top_p, args.seed)
    engine = ENGINES[args.engine](args)
    config = engine.config
    tokenizer, stop = _tokenizer(args, config), _stop_tokens(args, config)
    if ids is None:
        ids = tokenizer.encode(args.prompt)
    _check_prompt(args, ids, config)
    engine.load(len(ids) + args.max_tokens)
    began, tokens = time.perf_counter(), engine.tokens(ids, sampling, stop)
    completion = complete(list(tokens) if args.json else _print_text(tokens, tokenizer, stop), stop)
    _report(args, ids, completion, tokenizer, time.perf_counter() - began)
    return 0


def _check(args: argparse.Namespace) -> None:
    """What can be told before the weights are read."""
    if args.engine not in ENGINES:
        raise ConfigError(f"--engine = {args.engine}: expected {' or '.join(ENGINES)}")
    if args.engine == "megakernel" and args.dtype is not None:
        raise ConfigError(f"--dtype = {args.dtype}: packed weights have their own: choose it in k3 pack")
    if args.max_tokens < 1:
        raise ConfigError(f"--max-tokens = {args.max_tokens}: expected a positive integer")
    if args.prompt == "":
        raise ConfigError("--prompt is empty: expected at least one character")


def _prompt_ids(path: Path) -> list[int]:
    array = read_tokens(path, "--prompt-tokens")
    if array.ndim == 2 and len(array) == 1:
        array = array[0]
    if array.ndim != 1:
        raise ConfigError(f"--prompt-tokens = {path}: shape {array.shape}: expected [T] or [1, T]")
    return array.tolist()


def _check_prompt(args: argparse.Namespace, ids: list[int], config: K3Config) -> None:
    if args.prompt_tokens is not None:
        check_vocabulary(ids, config, "--prompt-tokens")
    if len(ids) + args.max_tokens > config.max_positions:
        raise ConfigError(
            f"--max-tokens = {args.max_tokens} after a prompt of {len(ids)} tokens: expected at most "
            f"max_positions = {config.max_positions} together"
        )


def _tokenizer(args: argparse.Namespace, config: K3Config) -> "AnyTokenizer | None":
    """That of --tokenizer, of the training run, or of the released directory; bytes for a small vocabulary. None where
    there is none and none is needed: ids in, ids out."""
    from k3_jax.weights.orbax import find_step, read_run
    from k3_jax.weights.tokenizer import load_tokenizer

    source, step = args.tokenizer, find_step(args.checkpoint)
    if source is None:
        source = args.checkpoint if step is None else read_run(step).get("config", {}).get("data", {}).get("tokenizer")
    try:
        return load_tokenizer(source, config.vocab_size)
    except ConfigError:
        if args.prompt_tokens is not None and args.tokenizer is None and args.json:
            return None
        raise


def _stop_tokens(args: argparse.Namespace, config: K3Config) -> set[int]:
    check_vocabulary(args.stop_token, config, "--stop-token")
    return set(args.stop_token) | (set() if args.ignore_eos else {config.eos_token_id})


class Xla:
    """The model of a checkpoint, compiled by XLA for one device."""

    def __init__(self, args: argparse.Namespace):
        from k3_jax.nn.pretrained import load_config

        self._args = args
        self.config = load_config(args.checkpoint)

    def load(self, tokens: int) -> None:
        from k3_jax.nn.pretrained import load_model
        from k3_jax.serve.decode import room

        self._dtype, self._model = compute_dtype(self._args.dtype), load_model(self._args.checkpoint)
        self._cache = self._model.init_cache(1, room(tokens), self._dtype)

    def tokens(self, ids: list[int], sampling: "SamplingConfig", stop: set[int]) -> Iterator[int]:
        """New tokens as they come; a stop token is the last."""
        from k3_jax.serve.decode import decode
        from k3_jax.serve.prefill import prefill

        filled = prefill(self._model, np.asarray([ids]), self._cache, dtype=self._dtype)
        rows = decode(
            self._model, filled.logits, filled.cache,
            max_tokens=self._args.max_tokens, sampling=sampling, stop=stop, steps=STEPS, dtype=self._dtype,
        )  # fmt: skip
        for row in rows:
            yield int(row[0])


class Megakernel:
    """Packed weights, on as many devices as they were packed for."""

    def __init__(self, args: argparse.Namespace):
        from k3_jax.serve.packed import Packed

        self._args, self._packed = args, Packed.open(args.checkpoint)
        self.config = self._packed.cut.model

    def load(self, tokens: int) -> None:
        from k3_jax.serve.megakernel import Engine, fake_cpus

        fake_cpus(self._packed.cut.ranks)
        self._engine = Engine.load(self._packed, rows=1, capacity=tokens, steps=STEPS)

    def tokens(self, ids: list[int], sampling: "SamplingConfig", stop: set[int]) -> Iterator[int]:
        """As of Xla."""
        for row in self._engine.generate([ids], max_tokens=self._args.max_tokens, sampling=sampling, stop=stop):
            yield int(row[0])


ENGINES = {"xla": Xla, "megakernel": Megakernel}


def _print_text(tokens: Iterator[int], tokenizer: "AnyTokenizer", stop: set[int]) -> list[int]:
    """Prints the text of tokens as they come, whole characters only. Returns all tokens."""
    from k3_jax.weights.tokenizer import StreamDecoder

    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(encoding="utf-8", errors="replace")
    decoder, seen = StreamDecoder(tokenizer), []
    for token in tokens:
        seen.append(token)
        if token not in stop:
            print(decoder.push(token), end="", flush=True)
    print(decoder.finish(), end="\n" if sys.stdout.isatty() else "", flush=True)
    return seen


def _report(
    args: argparse.Namespace, ids: list[int], completion: "Completion", tokenizer: "AnyTokenizer | None", seconds: float
) -> None:
    """The JSON object on stdout, or a line about the run on stderr."""
    if not args.json:
        print(
            f"k3 generate: {len(ids)} prompt tokens, {len(completion.tokens)} new in {seconds:.1f} s with compiling, "
            f"ended by {completion.finish_reason}",
            file=sys.stderr,
        )
        return
    result = {
        "prompt_tokens": ids,
        "tokens": completion.tokens,
        "text": None if tokenizer is None else tokenizer.decode(completion.tokens),
        "finish_reason": completion.finish_reason,
        "seed": args.seed,
        "temperature": args.temperature,
        "top_k": args.top_k,
        "top_p": args.top_p,
        "seconds": round(seconds, 3),
    }
    print(json.dumps(result))
