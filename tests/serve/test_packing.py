"""`k3 pack`: what it leaves equals packing in memory and the checkpoint's own bits, whatever interrupted it."""

import hashlib
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import Mesh

from k3_jax import cli
from k3_jax.config import ConfigError
from k3_jax.dtypes import mxfp4_decode
from k3_jax.nn import pretrained
from k3_jax.serve import packing, sources
from k3_jax.serve.pack import pack
from k3_jax.serve.packed import JOURNAL, MANIFEST, Cut, Packed, file_name
from k3_jax.serve.packing import pack_checkpoint
from k3_jax.serve.sources import open_checkpoint
from k3_jax.weights.reader import ReleasedCheckpoint
from k3_jax.weights.released import save_released
from pallas_kernels.decode import AXIS
from pallas_kernels.decode.pack import unpack_records
from tests.decode.model import model_config, weights

CONFIG = model_config(layers=4)
RANKS = 4
QUIET = lambda *_: None  # noqa: E731


@pytest.fixture(scope="module")
def named() -> dict[str, np.ndarray]:
    return weights(CONFIG)


@pytest.fixture(scope="module")
def checkpoint(named, tmp_path_factory):
    directory = tmp_path_factory.mktemp("released") / "checkpoint"
    save_released(directory, CONFIG, named)
    return directory


@pytest.fixture(scope="module")
def cut(checkpoint) -> Cut:
    return Cut(pretrained.load_config(checkpoint), RANKS, "bfloat16")


@pytest.fixture(scope="module")
def packed(checkpoint, cut, tmp_path_factory) -> Packed:
    out = tmp_path_factory.mktemp("packed") / "out"
    return pack_checkpoint(open_checkpoint(checkpoint, cut.model), cut, out, QUIET)


@pytest.fixture
def copy(packed, tmp_path) -> Packed:
    shutil.copytree(packed.directory, tmp_path / "copy")
    return Packed.open(tmp_path / "copy")


def contents(directory) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def test_equals_packing_in_memory(packed, named, cut):
    """On the devices, verified: the same bits as the kernel's tests use."""
    plan = cut.plan()
    loaded = packed.load(plan, Mesh(np.array(jax.devices()[:RANKS]), (AXIS,)))
    for name, expected in pack(plan, named).items():
        assert loaded[name].dtype == expected.dtype
        np.testing.assert_array_equal(np.asarray(loaded[name]), expected, err_msg=name)


def check_experts(packed: Packed, checkpoint) -> None:
    """All ranks' codes and scales together are the released bytes, and the values those of the exact decoder; what the
    kernel's sizes add is zero."""
    plan, model = packed.cut.plan(), packed.cut.model
    released = ReleasedCheckpoint(checkpoint, model)
    for number, layer in enumerate(plan.config.moe_layers):
        ranks = [
            unpack_records(plan.record, packed.read("experts", rank, plan.weights["experts"])[number])
            for rank in range(packed.cut.ranks)
        ]
        for place, (name, axis) in enumerate({"w1": 1, "w3": 1, "w2": 2}.items()):
            codes = np.concatenate([rank[place].codes for rank in ranks], axis)
            scales = np.concatenate([rank[place].scales for rank in ranks], axis)
            stored, stored_scales = released.read_packed(f"layers.{layer}.moe.{name}", 0, model.moe.num_experts)
            E, out, groups = stored_scales.shape
            halves = codes[..., ::2] | codes[..., 1::2] << 4
            np.testing.assert_array_equal(halves[:, :out, : 16 * groups], stored)
            np.testing.assert_array_equal(scales[:, :out, :groups], stored_scales)
            exact = np.zeros(codes.shape, np.float32)
            exact[:, :out, : 32 * groups] = mxfp4_decode(stored, stored_scales, np.float32)
            np.testing.assert_array_equal(mxfp4_decode(halves, scales, np.float32), exact)


def test_experts_have_the_checkpoints_own_codes(packed, checkpoint):
    check_experts(packed, checkpoint)


@pytest.mark.parametrize("name", ["k3_tiny_a", "k3_tiny_c"])
def test_golden_checkpoints(name, golden, tmp_path, request):
    """Narrower than the kernel's lanes: every array as large as the plan says, experts as released."""
    folder = golden / name if name == "k3_tiny_c" else request.getfixturevalue("shared") / "golden" / name
    model = pretrained.load_config(folder)
    check_experts(pack_checkpoint(open_checkpoint(folder, model), Cut(model, 2, "bfloat16"), tmp_path, QUIET), folder)


class Stopped(Exception):
    pass


def stop_after(count: int):
    """A report that ends the run after so many sections."""
    seen = []

    def report(*section):
        seen.append(section)
        if len(seen) == count:
            raise Stopped

    return report


def test_an_interrupted_run_goes_on(packed, checkpoint, cut, tmp_path, monkeypatch):
    """Stopped between sections, then inside of one whose bytes are half written and whose journal line is cut."""
    source = open_checkpoint(checkpoint, cut.model)
    with pytest.raises(Stopped):
        pack_checkpoint(source, cut, tmp_path / "out", stop_after(4))
    with pytest.raises(ConfigError, match="packing is unfinished: run k3 pack again"):
        Packed.open(tmp_path / "out")
    with open(tmp_path / "out" / JOURNAL, "a") as journal:
        journal.write('{"name": "layers.2.chan')
    unfinished = packed.sections[4]
    with open(tmp_path / "out" / file_name(unfinished["array"], 1), "r+b") as file:
        file.seek(unfinished["begin"])
        file.write(b"half of a section")
    written, original = [], packing._Writer._write

    def recorded(self, section, source):
        written.append(section.name)
        original(self, section, source)

    monkeypatch.setattr(packing._Writer, "_write", recorded)
    pack_checkpoint(source, cut, tmp_path / "out", QUIET)
    assert written == [section["name"] for section in packed.sections[4:]]
    assert contents(tmp_path / "out") == contents(packed.directory)
    written.clear()
    pack_checkpoint(source, cut, tmp_path / "out", QUIET)
    assert not written


def test_a_full_disk_keeps_what_is_done(packed, checkpoint, cut, tmp_path, monkeypatch, capsys):
    arguments = ["pack", "--checkpoint", str(checkpoint), "--out", str(tmp_path / "out"), "--ranks", str(RANKS)]
    original, calls = packing._write_at, []

    def full(*given):
        calls.append(given)
        if len(calls) > 10:
            raise OSError(28, "No space left on device")
        original(*given)

    monkeypatch.setattr(packing, "_write_at", full)
    assert cli.main(arguments) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and "the disk is full: free some of it and run the command again" in err
    monkeypatch.setattr(packing, "_write_at", original)
    assert cli.main(arguments) == 0
    assert contents(tmp_path / "out") == contents(packed.directory)
    free = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(packing.shutil, "disk_usage", lambda _: free)
    assert cli.main([*arguments[:3], "--out", str(tmp_path / "other"), *arguments[5:]]) == 2
    assert "are still to be written, 0.0 GiB are free: expected a larger disk" in capsys.readouterr().err


@pytest.mark.parametrize("array", ["tape", "experts", "vectors", "embed"])
def test_a_flipped_byte_is_found(copy, cut, array):
    path = copy.directory / file_name(array, 2)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    like = cut.plan().weights[array]
    with pytest.raises(ConfigError, match=f"{path.name}: .*: wrong checksum"):
        copy.read(array, 2, like)
    copy.read(array, 1, like)


def test_damaged_directories(copy, packed):
    directory = copy.directory
    path = directory / file_name("keys", 3)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ConfigError, match="keys-003.bin: .* bytes: expected"):
        Packed.open(directory)
    data = json.loads((packed.directory / MANIFEST).read_text())
    for change, message in (
        ({"ranks": 2}, "config_hash does not belong"),
        ({"layout_version": 0}, "layout_version = 0: expected"),
        ({"model": None}, "K3Config = None"),
    ):
        (directory / MANIFEST).write_text(json.dumps(data | change))
        with pytest.raises(ConfigError, match=message):
            Packed.open(directory)
    (directory / MANIFEST).write_text(json.dumps(data)[:-10])
    with pytest.raises(ConfigError, match="manifest.json: damaged"):
        Packed.open(directory)
    (directory / MANIFEST).unlink()
    with pytest.raises(ConfigError, match="expected a directory of k3 pack"):
        Packed.open(directory)


def test_another_configuration_or_checkpoint_is_refused(copy, checkpoint, cut, tmp_path):
    source = open_checkpoint(checkpoint, cut.model)
    with pytest.raises(ConfigError, match=r"another configuration \(ranks: 4 != 2\): choose another directory"):
        pack_checkpoint(source, Cut(cut.model, 2, "bfloat16"), copy.directory, QUIET)
    changed = tmp_path / "changed"
    shutil.copytree(checkpoint, changed, copy_function=shutil.copyfile)  # the same bytes with other times
    with pytest.raises(ConfigError, match="packed from another checkpoint"):
        pack_checkpoint(open_checkpoint(changed, cut.model), cut, copy.directory, QUIET)
    with pytest.raises(Stopped):
        pack_checkpoint(source, cut, tmp_path / "begun", stop_after(1))
    with pytest.raises(ConfigError, match="packed from another checkpoint"):
        pack_checkpoint(open_checkpoint(changed, cut.model), cut, tmp_path / "begun", QUIET)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").write_text("mine")
    with pytest.raises(ConfigError, match="holds other files"):
        pack_checkpoint(source, cut, tmp_path / "other", QUIET)
    with pytest.raises(ConfigError, match="is a file: expected a new or empty directory"):
        pack_checkpoint(source, cut, tmp_path / "other" / "file", QUIET)


def test_ranks_that_do_not_divide_the_heads(golden, tmp_path, capsys):
    out = tmp_path / "out"
    arguments = ["pack", "--checkpoint", str(golden / "k3_tiny_c"), "--out", str(out), "--ranks"]
    for ranks, message in (
        ("4", "kda.heads = 2: expected a multiple of ranks = 4"),
        ("1", "ranks = 1: expected at le"),
    ):
        assert cli.main([*arguments, ranks]) == 2
        err = capsys.readouterr().err
        assert err.count("\n") == 1 and message in err
    assert not out.exists()


def test_orbax(packed, named, cut, tmp_path, monkeypatch):
    """A training run's step gives the same arrays; values that bfloat16 has not are refused by name."""
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "1" / "model", {name: jnp.asarray(x) for name, x in named.items()})
    again = pack_checkpoint(open_checkpoint(tmp_path, cut.model), cut, tmp_path / "out", QUIET)
    for name, like in cut.plan().weights.items():
        expected = packed.read(name, 3, like).view(np.uint8)
        if name != "experts":  # equal values have several encodings
            np.testing.assert_array_equal(again.read(name, 3, like).view(np.uint8), expected, err_msg=name)
    monkeypatch.setattr(sources, "read_array", lambda item, name: named[name] + np.float32(1e-4))
    with pytest.raises(ConfigError, match="layers.0.mixer: project holds values that bfloat16 has not"):
        pack_checkpoint(open_checkpoint(tmp_path, cut.model), cut, tmp_path / "refused", QUIET)


def test_layout_version(packed):
    """Whoever changes what stands in the files raises LAYOUT_VERSION, and then this digest."""
    digest = hashlib.sha256()
    for section in packed.sections:
        if section["array"] != "heads":  # holds exponentials, whose last bit is the machine's
            digest.update(json.dumps(section, sort_keys=True).encode())
    assert digest.hexdigest()[:16] == "cb8739c97fac7214"
