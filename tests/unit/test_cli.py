"""The `k3` command: what it prints, where errors go, and that help needs no JAX. Training is tested in tests/train."""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import textwrap

import numpy as np
import pytest

from k3_jax import cli
from k3_jax.serve import generate_command, score_command
from tests.models import tiny_config


def python(code: str, *arguments: str, **kwargs) -> subprocess.CompletedProcess:
    command = [sys.executable, "-c", textwrap.dedent(code), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, **kwargs)


K3 = "import sys; from k3_jax.cli import main; sys.exit(main())"


@pytest.fixture
def checkpoint(golden) -> str:
    return str(golden / "k3_tiny_c")


@pytest.fixture(scope="module")
def expected(golden) -> dict[str, np.ndarray]:
    return dict(np.load(golden / "k3_tiny_c" / "expected.npz"))


@pytest.fixture
def files(tmp_path):
    """Token files, good and bad, in an `in` folder; commands write beside it."""
    folder = tmp_path / "in"
    folder.mkdir()
    arrays = {
        "good": np.zeros((2, 5), int),
        "row": np.zeros(5, int),
        "outside": np.full((1, 3), 128),
        "negative": np.full((1, 3), -1),
        "float": np.zeros((2, 5)),
        "empty": np.zeros((1, 0), int),
        "long": np.zeros((1, 4097), int),
    }
    for name, array in arrays.items():
        np.save(folder / f"{name}.npy", array)
    (folder / "cut.npy").write_bytes((folder / "long.npy").read_bytes()[:-1000])
    (folder / "text.npy").write_text("1 2 3\n")
    np.savez(folder / "several.npz", a=arrays["good"])
    return folder


@pytest.mark.parametrize("command", [None, *cli.COMMANDS])
def test_help_has_an_example_and_needs_no_jax(command):
    code = """
        import sys
        from k3_jax.cli import main
        try:
            main([*sys.argv[1:], "--help"])
        except SystemExit as end:
            assert end.code == 0
        assert "jax" not in sys.modules and "flax" not in sys.modules
    """
    done = python(code, *([command] if command else []))
    assert done.returncode == 0, done.stderr
    assert "example" in done.stdout and re.search(rf" k3 {command or 'generate'}( kda)? --", done.stdout)


def test_score_equals_the_released_code(checkpoint, expected, tmp_path, capsys):
    tokens, out = tmp_path / "tokens.npy", tmp_path / "logits.npy"
    np.save(tokens, expected["input_ids"])
    arguments = ["score", "--checkpoint", checkpoint, "--tokens", str(tokens), "--out", str(out)]
    assert cli.main([*arguments, "--dtype", "float32"]) == 0
    logits = np.load(out)
    assert logits.dtype == np.float32 and logits.shape == expected["logits"].shape
    assert np.abs(logits - expected["logits"]).max() <= 5e-4
    assert np.array_equal(logits.argmax(-1), expected["logits"].argmax(-1))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["logits.npy", "tokens.npy"]
    assert capsys.readouterr().out == ""


def generate(checkpoint, *arguments) -> list[str]:
    return ["generate", "--checkpoint", checkpoint, *arguments]


def test_generate_greedy_as_json(checkpoint, expected, tmp_path, capsys):
    np.save(tmp_path / "ids.npy", expected["greedy_prompt"])
    arguments = generate(checkpoint, "--prompt-tokens", str(tmp_path / "ids.npy"), "--max-tokens", "24", "--json")
    assert cli.main([*arguments, "--dtype", "float32"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["prompt_tokens"] == expected["greedy_prompt"][0].tolist()
    assert result["tokens"] == expected["greedy"].tolist()
    assert result["text"].encode() == bytes(result["tokens"])
    assert result["finish_reason"] == "length" and result["seed"] == 0
    stop = str(result["tokens"][6])
    assert cli.main([*arguments, "--dtype", "float32", "--stop-token", stop]) == 0
    stopped = json.loads(capsys.readouterr().out)
    assert stopped["finish_reason"] == "stop"
    assert stopped["tokens"] == result["tokens"][: result["tokens"].index(int(stop))]


@pytest.mark.slow
def test_generate_streams_the_same_text(checkpoint, capsys):
    sampled = ["--prompt", "def ", "--max-tokens", "40", "--temperature", "0.8", "--top-p", "0.9", "--seed", "3"]
    arguments = generate(checkpoint, *sampled, "--dtype", "float32", "--ignore-eos")
    streamed = subprocess.run([sys.executable, "-c", K3, *arguments], capture_output=True, timeout=300)
    assert streamed.returncode == 0 and b"40 new in" in streamed.stderr
    assert cli.main([*arguments, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["prompt_tokens"] == list(b"def ") and len(result["tokens"]) == 40
    assert streamed.stdout == bytes(result["tokens"])


GENERATE = [
    (["--prompt", "é"], "byte 195 (0xc3) at position 0: expected bytes below vocab_size = 128"),
    (["--prompt", ""], "--prompt is empty"),
    (["--prompt", "x", "--max-tokens", "4096"], "expected at most max_positions = 4096 together"),
    (["--prompt", "x", "--max-tokens", "0"], "--max-tokens = 0: expected a positive integer"),
    (["--prompt", "x", "--max-tokens", "many"], "invalid int value: 'many'"),
    (["--prompt", "x", "--temperature", "-0.5"], "temperature = -0.5: expected a number >= 0"),
    (["--prompt", "x", "--temperature", "nan"], "temperature = nan: expected a number >= 0"),
    (["--prompt", "x", "--top-p", "0"], "top_p = 0.0: expected a number in (0, 1]"),
    (["--prompt", "x", "--top-p", "1.1"], "top_p = 1.1"),
    (["--prompt", "x", "--top-k", "-1"], "top_k = -1"),
    (["--prompt", "x", "--seed", "-1"], "seed = -1"),
    (["--prompt", "x", "--stop-token", "128"], "--stop-token[0] = 128: expected 0..127"),
    (["--prompt", "x", "--engine", "megakernel"], "has no manifest.json: expected a directory of k3 pack"),
    (["--prompt", "x", "--engine", "gpu"], "--engine = gpu: expected xla or megakernel"),
    (["--prompt", "x", "--engine", "megakernel", "--dtype", "float32"], "--dtype = float32: packed weights have their"),
    (["--prompt", "x", "--tokenizer", "absent.model"], "tokenizer = absent.model: no such file"),
    (["--prompt", "x", "--prompt-tokens", "in/good.npy"], "not allowed with argument --prompt"),
    ([], "one of the arguments --prompt --prompt-tokens is required"),
    (["--prompt-tokens", "in/good.npy"], "shape (2, 5): expected [T] or [1, T]"),
    (["--prompt-tokens", "in/outside.npy"], "--prompt-tokens[0] = 128: expected 0..127"),
    (["--prompt-tokens", "in/empty.npy"], "expected at least one token"),
    (["--prompt-tokens", "in/absent.npy"], "in/absent.npy: cannot be read (No such file or directory)"),
    (["--prompt", "x", "--tmperature", "1"], "unrecognized arguments: --tmperature 1"),
]
SCORE = [
    ("row", "shape (5,): expected [B, T]"),
    ("outside", "--tokens[0, 0] = 128: expected 0..127"),
    ("negative", "--tokens[0, 0] = -1: expected 0..127"),
    ("float", "holds float64: expected one array of integers"),
    ("empty", "shape (1, 0): expected at least one token"),
    ("long", "--tokens = 4097 tokens in a row: expected at most max_positions = 4096"),
    ("cut", "cannot be read (not a .npy file of numbers, or cut short)"),
    ("text", "cannot be read (not a .npy file of numbers, or cut short)"),
    ("absent", "cannot be read (No such file or directory)"),
]


def assert_user_error(arguments, message, capsys):
    """Exit status 2 and one line on stderr; nothing on stdout."""
    try:
        status = cli.main(arguments)
    except SystemExit as end:  # argparse
        status = end.code
    out, err = capsys.readouterr()
    assert status == 2 and out == ""
    assert err.count("\n") == 1 and err.startswith(f"k3 {arguments[0]}: error: ") and message in err, err


@pytest.mark.parametrize(("arguments", "message"), GENERATE)
def test_generate_refuses(checkpoint, files, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(files.parent)
    assert_user_error(generate(checkpoint, *arguments), message, capsys)


@pytest.mark.parametrize(("name", "message"), SCORE)
def test_score_refuses(checkpoint, files, capsys, name, message):
    out = files.parent / "logits.npy"
    arguments = ["score", "--checkpoint", checkpoint, "--tokens", str(files / f"{name}.npy"), "--out", str(out)]
    assert_user_error(arguments, message, capsys)
    assert [path.name for path in files.parent.iterdir()] == ["in"]


def test_score_refuses_places_and_archives(checkpoint, files, capsys):
    arguments = ["score", "--checkpoint", checkpoint, "--tokens", str(files / "good.npy")]
    assert_user_error([*arguments, "--out", str(files)], "expected a file in a folder that exists", capsys)
    assert_user_error([*arguments, "--out", str(files / "no" / "x.npy")], "expected a file in a folder", capsys)
    arguments[-1] = str(files / "several.npz")
    assert_user_error([*arguments, "--out", str(files / "x.npy")], "an archive of several arrays", capsys)


@pytest.mark.parametrize(
    "command", [["generate", "--prompt", "x"], ["score", "--tokens", "good.npy", "--out", "x.npy"]]
)
def test_bad_checkpoints(checkpoint, files, monkeypatch, capsys, command):
    monkeypatch.chdir(files)
    assert_user_error([*command, "--checkpoint", "absent"], "checkpoint absent: no such directory", capsys)
    assert_user_error([*command, "--checkpoint", "."], "neither an Orbax checkpoint nor", capsys)
    broken = files / "broken"
    shutil.copytree(checkpoint, broken)
    shard = broken / "model-00002-of-000004.safetensors"
    shard.write_bytes(shard.read_bytes()[: shard.stat().st_size // 2])
    assert_user_error([*command, "--checkpoint", "broken"], shard.name, capsys)
    assert not (files / "x.npy").exists()


def test_a_failed_score_leaves_the_old_file(checkpoint, files, monkeypatch):
    out = files.parent / "logits.npy"
    out.write_text("old")

    def fail(*_):
        yield np.zeros((5, 128), np.float32)
        raise OSError("No space left on device")

    monkeypatch.setattr(score_command, "logit_pieces", fail)
    with pytest.raises(OSError, match="No space"):
        cli.main(["score", "--checkpoint", checkpoint, "--tokens", str(files / "good.npy"), "--out", str(out)])
    assert out.read_text() == "old" and {path.name for path in files.parent.iterdir()} == {"in", "logits.npy"}


def test_ids_need_no_tokenizer_in_json(tmp_path):
    """A large vocabulary without a tokenizer file: ids in, ids out; text is refused."""
    config = tiny_config(vocab_size=1000)
    args = argparse.Namespace(tokenizer=None, checkpoint=tmp_path, prompt_tokens=tmp_path / "ids.npy", json=True)
    assert generate_command._tokenizer(args, config) is None
    args.json = False
    with pytest.raises(ValueError, match="vocab_size = 1000: without a tokenizer file"):
        generate_command._tokenizer(args, config)


class Fake:
    """A command that raises."""

    error: BaseException

    @staticmethod
    def add_arguments(parser):
        pass

    @classmethod
    def run(cls, args):
        raise cls.error


@pytest.mark.parametrize(("error", "status"), [(KeyboardInterrupt(), 130), (cli.ConfigError("a\nb"), 2)])
def test_exit_status(monkeypatch, capsys, error, status):
    monkeypatch.setitem(cli.COMMANDS, "fake", cli.Command("fake_command", "x", "y"))
    monkeypatch.setitem(sys.modules, "fake_command", Fake)
    Fake.error = error
    assert cli.main(["fake"]) == status
    assert capsys.readouterr().err == ("" if status == 130 else "k3 fake: error: a b\n")


def test_other_exceptions_keep_their_traceback(monkeypatch):
    monkeypatch.setitem(cli.COMMANDS, "fake", cli.Command("fake_command", "x", "y"))
    monkeypatch.setitem(sys.modules, "fake_command", Fake)
    Fake.error = ZeroDivisionError()
    with pytest.raises(ZeroDivisionError):
        cli.main(["fake"])


def test_a_closed_pipe_is_quiet(tmp_path):
    (tmp_path / "fake_command.py").write_text(
        "def add_arguments(parser): pass\ndef run(args):\n    while True: print('text', flush=True)\n"
    )
    code = "import sys; from k3_jax import cli; cli.COMMANDS['fake'] = cli.Command('fake_command', 'x', 'y'); "
    code += f"sys.path.insert(0, {str(tmp_path)!r}); sys.exit(cli.main(['fake']))"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout.readline() == b"text\n"
    process.stdout.close()
    assert process.stderr.read() == b"" and process.wait(60) == 141
    process.stderr.close()


@pytest.mark.parametrize(("flags", "cached"), [("", "True"), ("--xla_force_host_platform_device_count=2", "False")])
def test_programs_of_several_cpu_devices_are_not_cached(flags, cached):
    """Read back they would hang: see cli._set_environment."""
    code = "import k3_jax.cli as c; c._set_environment(); import jax; print(jax.config.jax_enable_compilation_cache)"
    environment = {name: x for name, x in os.environ.items() if name != "JAX_ENABLE_COMPILATION_CACHE"}
    assert python(code, env=environment | {"XLA_FLAGS": flags}).stdout.strip() == cached


def test_unknown_commands():
    with pytest.raises(SystemExit) as end:
        cli.main(["generte"])
    assert end.value.code == 2
