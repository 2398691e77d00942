"""The ahead-of-time machinery itself, on small programs: keys, reports, facts, chip facts."""

import dataclasses
import json
import os
import shutil
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import PartitionSpec as P
from jax.sharding import reshard

from pallas_kernels.common import aot, tpu


def two_layers(w, x):
    """The loss and gradient of a sharded two-layer network: collectives of three kinds."""

    def loss(w):
        up, down = w
        hidden = jax.nn.silu(jnp.einsum("bd,df->bf", x, reshard(up, P(None, "tensor"))))
        out = jnp.einsum("bf,fd->bd", hidden, down, out_sharding=P("fsdp", None))
        return jnp.mean(out.astype(jnp.float32) ** 2)

    return jax.value_and_grad(loss)(w)


def lower_two_layers(topology: str, width: int = 1024) -> jax.stages.Lowered:
    mesh = aot.mesh_for(topology, fsdp=2, tensor=4)
    up = aot.abstract((width, 4 * width), jnp.bfloat16, mesh, "fsdp", "tensor")
    down = aot.abstract((4 * width, width), jnp.bfloat16, mesh, "tensor", None)
    return aot.lower_for(two_layers, (up, down), aot.abstract((2048, width), jnp.bfloat16, mesh, "fsdp"), mesh=mesh)


@pytest.mark.parametrize("topology", ["v5p:2x2x2", "v6e:2x4", "tpu7x:2x2x1"])
def test_facts_of_a_sharded_program(facts, topology):
    report = facts.check(f"machinery_{topology.partition(':')[0]}", lower_two_layers(topology), topology)
    assert set(report.collectives) == {"all-gather", "all-reduce", "reduce-scatter"}
    assert 0 < report.argument_bytes < report.peak_bytes < tpu.chip(topology).hbm_bytes


def pallas_double(x):
    def kernel(x_ref, o_ref):
        o_ref[...] = jnp.exp(x_ref[...]) * 2

    block = pl.BlockSpec((128, 256), lambda i: (i, 0))
    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return pl.pallas_call(kernel, out_shape=shape, grid=(2,), in_specs=[block], out_specs=block, name="double")(x)


def test_facts_of_a_pallas_kernel(facts):
    mesh = aot.mesh_for("tpu7x:2x2x1", device=1)
    lowered = aot.lower_for(pallas_double, aot.abstract((256, 256), jnp.float32, mesh), mesh=mesh)
    report = facts.check("machinery_pallas", lowered, "tpu7x:2x2x1")
    assert report.custom_calls == {"tpu_custom_call": 1}


PROGRAM = """
import jax, jax.numpy as jnp, sys
from jax.experimental import pallas as pl
from pallas_kernels.common import aot
def kernel(x_ref, o_ref):
    o_ref[...] = jnp.exp(x_ref[...])
def f(x):
    return jax.nn.relu(pl.pallas_call(kernel, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype))(x))
mesh = aot.mesh_for("v6e:2x4", fsdp=8)
one = aot.mesh_for("v6e:2x4", d=1)
print(aot.fact_key(aot.lower_for(f, aot.abstract((256, 256), jnp.float32, one), mesh=one), "v6e:2x4"))
"""


def test_key_does_not_depend_on_the_place_or_line_of_the_source(tmp_path, root):
    """The same program from two folders, at other lines and call depth, has one key; another program has another."""
    wrapped = "\n\n# shifted\ndef run():\n" + textwrap.indent(PROGRAM, "    ") + "\nrun()\n"
    keys = []
    for name, text in (("a", PROGRAM), ("b/deeper", wrapped), ("c", PROGRAM.replace("jnp.exp", "jnp.sin"))):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "program.py").write_text(text)
        keys.append(_key_printed_in(tmp_path / name, root))
    assert keys[0] == keys[1]
    assert keys[0] != keys[2]


def _key_printed_in(folder, root) -> str:
    shutil.copytree(root / "pallas_kernels", folder / "pallas_kernels")
    environment = os.environ | {"PYTHONPATH": str(folder), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "program.py"]
    done = subprocess.run(command, cwd=folder, env=environment, check=True, capture_output=True, text=True)
    return done.stdout.strip()


def test_key_depends_on_topology_and_compiler(monkeypatch):
    lowered = lower_two_layers("v6e:2x4")
    key = aot.fact_key(lowered, "v6e:2x4")
    assert key == aot.fact_key(lower_two_layers("v6e:2x4"), "v6e:2x4")
    assert key != aot.fact_key(lowered, "v6e:4x2")
    monkeypatch.setattr(aot, "libtpu_version", lambda: "0.0.0")
    assert key != aot.fact_key(lowered, "v6e:2x4")


class TestFacts:
    """Missing, stale and wrong facts fail, and say what to run."""

    @pytest.fixture
    def written(self, facts, tmp_path):
        """A facts folder with one program's committed file copied into it."""
        if facts.mode == "refresh":
            pytest.skip("reads facts that this run may be writing")
        shutil.copy(facts.folder / "machinery_v6e.json", tmp_path / "program.json")
        return dataclasses.replace(facts, folder=tmp_path)

    def test_equal_facts_pass(self, written):
        written.check("program", lower_two_layers("v6e:2x4"), "v6e:2x4")

    def test_missing(self, written):
        with pytest.raises(pytest.fail.Exception, match="no facts for other yet: run make aot-facts ARGS='tests/aot/"):
            written.check("other", lower_two_layers("v6e:2x4"), "v6e:2x4")

    def test_stale(self, written):
        with pytest.raises(pytest.fail.Exception, match=r"stale \(program: .*run make aot-facts"):
            written.check("program", lower_two_layers("v6e:2x4", width=512), "v6e:2x4")

    @pytest.mark.aot_compile
    @pytest.mark.parametrize(
        ("field", "change", "passes"),
        [
            ("peak_bytes", lambda n: int(n * 1.01), True),
            ("peak_bytes", lambda n: int(n * 1.05), False),
            ("collectives", lambda c: c | {"all-gather": c["all-gather"] + 1}, False),
            ("collectives", lambda c: c | {"all-to-all": 1}, False),
            ("copies", lambda n: n + 1, False),
        ],
        ids=["within_2_percent", "5_percent", "one_gather_fewer", "a_kind_lost", "one_copy_fewer"],
    )
    def test_numbers(self, written, field, change, passes):
        path = written.folder / "program.json"
        content = json.loads(path.read_text())
        content["report"][field] = change(content["report"][field])
        path.write_text(json.dumps(content))
        compiling = dataclasses.replace(written, mode="compile")
        if passes:
            compiling.check("program", lower_two_layers("v6e:2x4"), "v6e:2x4")
        else:
            with pytest.raises(pytest.fail.Exception, match=field):
                compiling.check("program", lower_two_layers("v6e:2x4"), "v6e:2x4")


@pytest.mark.aot_compile
def test_too_large_for_vmem_is_an_error():
    mesh = aot.mesh_for("tpu7x:2x2x1", device=1)
    whole = lambda x: pl.pallas_call(  # noqa: E731
        lambda x_ref, o_ref: pltpu.sync_copy(x_ref, o_ref), out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype)
    )(x)
    with pytest.raises(jax.errors.JaxRuntimeError, match="(?i)memory"):
        aot.compile_for(whole, aot.abstract((8192, 2048), jnp.float32, mesh), mesh=mesh)


def test_bad_topologies():
    with pytest.raises(ValueError, match="topology = 'v7x:2x2'"):
        aot.topology("v7x:2x2")
    with pytest.raises(ValueError, match="at most 8 devices"):
        aot.mesh_for("v6e:2x4", fsdp=16)


def test_collectives_in_hlo_text():
    hlo = """
%all-reduce-scatter.1 (input: bf16[8,8]) -> bf16[8,4] {
  %all-reduce.4 = bf16[8,8]{1,0:T(8,128)(2,1)} all-reduce(%input), channel_id=4
}
ENTRY %main {
  %fusion = bf16[8,4]{1,0} fusion(%p), kind=kCustom, calls=%all-reduce-scatter.1
  %ag-start = (bf16[4], bf16[8]{0:T(8)}) all-gather-start(%p.1), channel_id=1
  %ag-done = bf16[8] all-gather-done(%ag-start)
  ROOT %all-to-all.2 = bf16[8] all-to-all(%ag-done), channel_id=2
  %copy-start = (bf16[8]{0:S(1)}, bf16[8], u32[]{:S(2)}) copy-start(%p)
  %copy.3 = bf16[8] copy(%p)
}
"""
    assert aot.hlo_collectives(hlo) == {"all-gather": 1, "all-to-all": 1, "reduce-scatter": 1}
    assert aot.hlo_opcodes(hlo)["copy"] == 1


@pytest.mark.parametrize("chip", tpu.CHIPS, ids=lambda chip: chip.name)
def test_chip_facts_are_those_of_jax(chip):
    version = {"v5p": "TPU_V5P", "v6e": "TPU_V6E", "tpu7x": "TPU_7X"}[chip.name]
    info = pltpu.get_tpu_info_for_chip(getattr(pltpu.ChipVersion, version), chip.cores)
    assert chip.vmem_bytes_per_core == info.vmem_capacity_bytes
    assert chip.smem_bytes_per_core == info.smem_capacity_bytes
    assert (chip.mxu_size, chip.mxus_per_core) == (info.mxu_column_size, info.num_mxus)
    assert chip.hbm_bytes == chip.cores * info.hbm_capacity_bytes
    assert chip.hbm_bandwidth == chip.cores * info.mem_bw_bytes_per_second
    assert chip.bf16_flops == chip.cores * info.bf16_ops_per_second
    assert (chip.fp8_flops or 0) == chip.cores * info.fp8_ops_per_second


def test_chip_by_name_topology_or_device_kind():
    assert tpu.chip("v6e") is tpu.chip("v6e:2x4") is tpu.chip("TPU v6 lite") is tpu.V6E
    assert tpu.chip("TPU7x") is tpu.chip("tpu7x:2x2x1") is tpu.TPU7X
    with pytest.raises(ValueError, match="chip = 'v4:2x2x1'"):
        tpu.chip("v4:2x2x1")
