"""The shipped recipes, how a recipe is found, and what is said of one that is wrong."""

import json
import math
import re

import pytest

from k3_jax import audit, recipe
from k3_jax.config import ConfigError, K3Config, RunConfig
from k3_jax.overrides import from_json, to_json
from k3_jax.plan.pod import pod
from k3_jax.recipe import find_recipe, load_recipe, shipped_recipes
from k3_jax.train.setup import check_run

PRETRAIN = {
    "configs/k3_pretrain_tpu7x_1024_1m.py": "tpu7x:8x8x16",
    "configs/k3_pretrain_tpu7x_1024_pipe.py": "tpu7x:8x8x16",
    "configs/k3_pretrain_tpu7x_512.py": "tpu7x:8x8x8",
    "configs/k3_pretrain_v5p_1024.py": "v5p:8x8x16",
}
RECIPES = [
    "configs/k3.py",
    "configs/k3_3b.py",
    "configs/k3_48b.py",
    *PRETRAIN,
    "configs/tiny.py",
    "configs/tiny_chat.py",
]
GOOD = """
from k3_jax.config import *
def get_config():
    model = K3Config(64, 32, 4, (3,), KDAConfig(4, 8), MLAConfig(4, 16, 8, 16, 8, 12), 48, MoEConfig(8, 2, 16, 24, 48))
    return RunConfig("mine", model, DataConfig(128, 8), OptimizerConfig(1e-3), TrainConfig(10))
"""


K3 = load_recipe("configs/k3.py").model
K3_PARTS = {type(part): part for part in (K3, K3.kda, K3.mla, K3.moe)}


def counts(config: K3Config) -> dict:
    return audit.count_parameters(config, audit.parameter_shapes(audit.abstract_model(config)))


def docstring(root, path) -> str:
    return compile((root / path).read_text(), path, "exec").co_consts[0]


def test_these_are_the_shipped_ones():
    assert shipped_recipes() == RECIPES


@pytest.mark.parametrize("path", RECIPES)
class TestShipped:
    def test_it_loads_and_its_name_is_that_of_the_file(self, path):
        config = load_recipe(path)
        assert isinstance(config, RunConfig)
        assert f"configs/{config.name}.py" == path
        assert from_json(RunConfig, json.loads(json.dumps(to_json(config)))) == config

    def test_docstring_says_command_hardware_wall_time_and_result(self, root, path):
        text = docstring(root, path)
        for word in ("Command:", "Hardware:", "Wall time:", "Expected:", "Parameters:"):
            assert len(re.findall(f"^{word} +\\S", text, re.MULTILINE)) == 1, word
        command = "plan" if path in ("configs/k3.py", *PRETRAIN) else "train"
        assert re.search(rf"^Command: +k3 {command} --config {path}( |$)", text, re.MULTILINE)
        assert re.search(r"\((measured|predicted)", text)
        assert re.search(r"\bours\b", text)

    def test_parameters_are_those_of_the_docstring(self, root, path):
        (stated,) = re.findall(r"^Parameters: ([\d,]+) total, ([\d,]+) active per token$", docstring(root, path), re.M)
        found = counts(load_recipe(path).model)
        assert [int(number.replace(",", "")) for number in stated] == [found["total"], found["active"]]

    def test_it_fits_its_mesh(self, path):
        """The sharded widths are divisible by fsdp, the rows of a micro-batch by the batch axes."""
        config = load_recipe(path)
        if path in PRETRAIN:
            check_run(config, pod(PRETRAIN[path]).mesh(config.mesh), init=None)
            return
        devices = {"k3": 4096, "k3_3b": 8, "k3_48b": 256}.get(config.name, 1)
        mesh = config.mesh
        fsdp = devices if mesh.fsdp == -1 else mesh.fsdp
        assert devices % fsdp == 0
        assert config.model.hidden_size % (fsdp * mesh.expert) == 0 and config.model.moe.latent_dim % fsdp == 0
        assert config.data.batch_size // config.train.grad_accumulation % devices == 0

    def test_it_is_k3_in_everything_but_size(self, path):
        model, last = load_recipe(path).model, load_recipe(path).model.num_layers - 1
        assert model.first_dense_layers == 1 and 0 not in model.mla_layers
        assert model.mla_layers[-1] == last
        if not path.startswith("configs/tiny"):
            assert model.mla_layers == (*range(3, last, 4), last)
            assert model.moe.latent_dim * 2 == model.hidden_size
        assert model.moe.shared_dim == 2 * model.moe.expert_dim
        for part in (model, model.kda, model.mla, model.moe):
            for field in ("gate_lower_bound", "conv_width", "latent_norm_eps", "routed_scaling_factor", "renormalize",
                          "norm_eps", "situ_beta", "situ_linear_beta"):  # fmt: skip
                assert getattr(part, field, None) == getattr(K3_PARTS[type(part)], field, None)


@pytest.mark.parametrize(
    ("path", "total", "active"),
    [("configs/k3_3b.py", 3e9, 0.5e9), ("configs/k3_48b.py", 48e9, 3e9), ("configs/k3.py", 2.78e12, 104.2e9)],
)
def test_sizes_are_what_the_names_say(path, total, active):
    found = counts(load_recipe(path).model)
    assert math.isclose(found["total"], total, rel_tol=0.1)
    assert math.isclose(found["active"], active, rel_tol=0.1)


def test_k3_is_the_released_configuration(shared):
    data = json.loads((shared / "golden" / "released" / "config.json").read_text())
    assert load_recipe("configs/k3.py").model == K3Config.from_hf(data)


@pytest.mark.parametrize("path", PRETRAIN)
def test_the_pretraining_recipes_are_of_the_released_model(path):
    assert load_recipe(path).model == K3


@pytest.mark.parametrize("path", RECIPES)
def test_every_model_can_be_released(path):
    model = load_recipe(path).model
    assert K3Config.from_hf(json.loads(json.dumps(model.to_hf()))) == model


def test_the_chat_recipe_starts_from_the_tiny_model():
    tiny, chat = load_recipe("configs/tiny.py"), load_recipe("configs/tiny_chat.py")
    assert chat.model == tiny.model
    assert chat.data.chat and not tiny.data.chat
    assert tiny.model.eos_token_id == 3  # what a turn ends with in byte tokens: k3_jax/train/corpus.py


class TestFinding:
    @pytest.fixture(autouse=True)
    def folders(self, tmp_path, monkeypatch):
        """A working directory, and a package in a folder, as in a checkout."""
        for name in ("cwd", "site/k3_jax"):
            (tmp_path / name).mkdir(parents=True)
        monkeypatch.chdir(tmp_path / "cwd")
        monkeypatch.setattr(recipe, "_PACKAGE", tmp_path / "site" / "k3_jax")
        self.places = [tmp_path / name / "configs" / "tiny.py" for name in ("cwd", "site/k3_jax", "site")]

    def write(self, *places):
        for place in places:
            place.parent.mkdir()
            place.write_text(GOOD)

    def test_working_directory_then_package_then_beside_it(self):
        for place in reversed(self.places):
            self.write(place)
            assert find_recipe("configs/tiny.py") == place
        assert load_recipe("configs/tiny.py").name == "mine"

    def test_shipped_ones_are_inside_a_wheel_or_beside_a_checkout(self):
        assert shipped_recipes() == []
        for place in reversed(self.places[1:]):
            self.write(place)
            assert shipped_recipes() == ["configs/tiny.py"]

    def test_an_absolute_path_is_itself(self, tmp_path):
        (tmp_path / "mine.py").write_text(GOOD)
        assert find_recipe(tmp_path / "mine.py") == tmp_path / "mine.py"
        with pytest.raises(ConfigError, match="nothing.py: expected this file"):
            find_recipe(tmp_path / "nothing.py")

    def test_loading_writes_nothing(self, tmp_path):
        self.write(self.places[0])
        load_recipe("configs/tiny.py")
        assert sorted(path.name for path in (tmp_path / "cwd").rglob("*")) == ["configs", "tiny.py"]


def test_a_missing_file_is_named_with_what_there_is(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        ConfigError, match=r"--config = configs/tny\.py: expected a file in .*configs/tiny\.py"
    ) as error:
        load_recipe("configs/tny.py")
    assert str(tmp_path) in str(error.value)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("x = 1\n", r"mine\.py: expected a function get_config\(\) that returns a RunConfig; there is none"),
        ("get_config = 3\n", r"expected a function get_config\(\) .*; a value of that name is not a function"),
        ("def get_config():\n    return 3\n", r"mine\.py: get_config\(\) returned int: expected a k3_jax"),
        ("def get_config():\n    pass\n", r"get_config\(\) returned NoneType"),
        ("def get_config(:\n", r"mine\.py:1: SyntaxError: invalid syntax"),
        ("def get_config():\n    x = 1\n     y = 2\n", r"mine\.py:3: IndentationError: unexpected indent"),
        ("import nothing_of_that_name\n", r"mine\.py:1: ModuleNotFoundError: No module named"),
        ("def get_config():\n    return 1 / 0\n", r"mine\.py:2: ZeroDivisionError: division by zero"),
        ("def get_config(size):\n    pass\n", r"mine\.py: TypeError: get_config\(\) missing 1 required"),
        ("raise SystemExit(0)\n", r"mine\.py:1: SystemExit: 0"),
        ("raise FileNotFoundError(2, 'No such file', 'x')\n", r"mine\.py:1: FileNotFoundError"),
        (GOOD.replace("KDAConfig(4, 8)", "KDAConfig(-4, 8)"), r"mine\.py:4: KDAConfig\.num_heads = -4: expected a pos"),
        (GOOD.replace("TrainConfig(10)", "TrainConfig(step=10)"), r"mine\.py:5: TypeError: .*'step'"),
        (b"x = '\xff'\n", r"mine\.py.*SyntaxError"),
        (b"x = '\x00'\n", r"mine\.py: SyntaxError: source code .*null bytes"),
    ],
)
def test_a_wrong_recipe_is_one_line_with_file_and_line(tmp_path, source, message):
    path = tmp_path / "mine.py"
    path.write_bytes(source if isinstance(source, bytes) else source.encode())
    with pytest.raises(ConfigError, match=message) as error:
        load_recipe(path)
    assert "\n" not in str(error.value)


def test_from_hf_is_public(golden):
    import k3_jax

    data = json.loads((golden / "k3_tiny_c" / "config.json").read_text())
    config = k3_jax.K3Config.from_hf(data)
    assert k3_jax.K3Config.from_hf(config.to_hf()) == config
