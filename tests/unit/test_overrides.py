"""`--set`, JSON and differences of configurations."""

import dataclasses
import json
import math

import pytest

from k3_jax.config import (
    ConfigError,
    ContextStage,
    Cosine,
    DataConfig,
    K3Config,
    KDAConfig,
    MLAConfig,
    MoEConfig,
    OptimizerConfig,
    RunConfig,
    TrainConfig,
    WarmupStableDecay,
)
from k3_jax.overrides import apply_overrides, differences, from_json, to_json

MODEL = K3Config(
    vocab_size=64,
    hidden_size=32,
    num_layers=4,
    mla_layers=(3,),
    kda=KDAConfig(num_heads=4, head_dim=8),
    mla=MLAConfig(4, q_lora_rank=16, kv_lora_rank=8, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=12),
    dense_dim=48,
    moe=MoEConfig(num_experts=8, top_k=2, latent_dim=16, expert_dim=24, shared_dim=48),
)
RUN = RunConfig(
    name="run",
    model=MODEL,
    data=DataConfig(sequence_length=128, batch_size=8),
    optimizer=OptimizerConfig(learning_rate=1e-3),
    train=TrainConfig(steps=10),
)


def get(config, path):
    for name in path.split("."):
        config = getattr(config, name)
    return config


@pytest.mark.parametrize(
    ("assignment", "value"),
    [
        ("train.steps=20", 20),
        ("train.steps=1_000", 1000),
        ("optimizer.learning_rate=2e-3", 2e-3),
        ("optimizer.learning_rate=1", 1.0),
        ("optimizer.grad_clip=inf", math.inf),
        ("model.kda.gate_lower_bound=-4.5", -4.5),
        ("model.kda.gate_lower_bound=None", None),
        ("optimizer.qk_clip=null", None),
        ("optimizer.qk_clip=100", 100.0),
        ("data.chat=true", True),
        ("data.chat=False", False),
        ("data.source=/data/my folder/a=b", "/data/my folder/a=b"),
        ("data.source='stdlib'", "stdlib"),
        ("data.source=", ""),
        ("data.source=none", "none"),
        ("name=12", "12"),
        ("model.mla_layers=(1, 3)", (1, 3)),
        ("model.mla_layers=1,3", (1, 3)),
        ("model.mla_layers=[]", ()),
        ("optimizer.schedule=WarmupStableDecay(decay_fraction=0.5)", WarmupStableDecay(0.5)),
        ("optimizer.schedule=WarmupStableDecay(0.5, min_ratio=0)", WarmupStableDecay(0.5, 0.0)),
        ("optimizer.schedule.min_ratio=0.3", 0.3),
        ("train.context_stages=(ContextStage(start=0.5, sequence_length=256),)", (ContextStage(0.5, 256),)),
        ("model.moe.num_experts=16", 16),
    ],
)
def test_value_by_the_type_of_its_field(assignment, value):
    changed = apply_overrides(RUN, [assignment])
    found = get(changed, assignment.partition("=")[0])
    assert found == value and type(found) is type(value)
    assert changed == from_json(RunConfig, json.loads(json.dumps(to_json(changed))))
    assert len(differences(RUN, changed)) == (found != get(RUN, assignment.partition("=")[0]))


def test_nothing_set_is_the_same_configuration():
    assert apply_overrides(RUN, []) == RUN


def test_later_ones_see_earlier_ones_and_the_last_wins():
    schedule = ["optimizer.schedule=WarmupStableDecay()", "optimizer.schedule.decay_fraction=0.4"]
    changed = apply_overrides(RUN, [*schedule, "train.steps=1", "train.steps=2"])
    assert changed.optimizer.schedule == WarmupStableDecay(decay_fraction=0.4)
    assert changed.train.steps == 2


def test_fields_that_depend_on_each_other_are_checked_when_all_are_set():
    for first, second in (
        ("train.grad_accumulation=3", "data.batch_size=9"),
        ("model.mla_layers=(7,)", "model.num_layers=8"),
    ):
        apply_overrides(RUN, [first, second])
        with pytest.raises(ConfigError):
            apply_overrides(RUN, [first])


@pytest.mark.parametrize(
    ("assignment", "parts"),
    [
        (
            "optimizer.learnig_rate=1",
            ["optimizer.learnig_rate", "did you mean optimizer.learning_rate?", "(fields: learning_rate, schedule,"],
        ),
        ("learning_rate=1", ["learning_rate: RunConfig", "did you mean optimizer.learning_rate?", "model, data"]),
        ("train.learning_rate=1", ["train.learning_rate: TrainConfig", "did you mean optimizer.learning_rate?"]),
        ("optimiser.learning_rate=1", ["optimiser: RunConfig", "did you mean optimizer?", "(fields: name, model,"]),
        ("model.kda.xyzzy=1", ["model.kda.xyzzy: KDAConfig has no such field (fields: num_heads,"]),
        ("model.kda.num_heads.x=1", ["model.kda.num_heads.x: model.kda.num_heads is 4, which has no fields"]),
        ("optimizer.schedule.decay_fraction=0.1", ["optimizer.schedule.decay_fraction: Cosine has no such field"]),
        ("train.steps=many", ["train.steps = many: expected an integer"]),
        ("train.steps=1e3", ["train.steps = 1000.0: expected an integer"]),
        ("train.steps=true", ["train.steps = True: expected an integer"]),
        ("train.steps=None", ["train.steps = None: expected an integer"]),
        ("train.steps=", ["train.steps = : expected an integer"]),
        ("train.steps=2*3", ["train.steps = 2*3: expected an integer"]),
        ("optimizer.learning_rate=fast", ["optimizer.learning_rate = fast: expected a number"]),
        ("optimizer.learning_rate=nan", ["optimizer.learning_rate = nan: expected a number"]),
        ("optimizer.qk_clip='a'", ["optimizer.qk_clip = 'a': expected a number or None"]),
        ("data.chat=0 == 1", ["data.chat = 0 == 1: expected True or False"]),
        ("data.chat=1", ["data.chat = 1: expected True or False"]),
        ("model.mla_layers=3", ["model.mla_layers = 3: expected a tuple of which each is an integer"]),
        ("model.mla_layers=(1, 'a')", ["model.mla_layers[1] = 'a': expected an integer"]),
        ("optimizer.schedule=0.1", ["optimizer.schedule = 0.1: expected Cosine(...) or WarmupStableDecay(...)"]),
        ("optimizer.schedule=Linear()", ["optimizer.schedule = Linear(): expected Cosine(...) or"]),
        ("optimizer.schedule=KDAConfig(1, 2)", ["optimizer.schedule = KDAConfig(", "expected Cosine(...) or"]),
        ("optimizer.schedule=Cosine(ratio=0.1)", ["optimizer.schedule.ratio: Cosine has no such field", "min_ratio"]),
        ("optimizer.schedule=Cosine('a')", ["optimizer.schedule.min_ratio = 'a': expected a number"]),
        ("optimizer.schedule=Cosine(0.1, 2)", ["expected Cosine(min_ratio)"]),
        ("optimizer.schedule=Cosine(min_ratio=2)", ["Cosine.min_ratio = 2.0: expected a number in [0, 1]"]),
        ("model.kda=KDAConfig(4)", ["model.kda.head_dim is missing: expected an integer"]),
        ("data.batch_size=-8", ["DataConfig.batch_size = -8: expected a positive integer"]),
        ("data.seed=-1", ["DataConfig.seed = -1: expected an integer >= 0"]),
        ("train.seed=-1", ["TrainConfig.seed = -1: expected an integer >= 0"]),
        ("train.steps", ["--set train.steps: expected field=value"]),
        ("=3", ["--set =3: expected field=value"]),
        ("train.steps=__import__('os').getcwd()", ["expected an integer"]),
        ("train..steps=1", ["train.: TrainConfig has no such field"]),
    ],
)
def test_errors_name_field_value_and_what_was_expected(assignment, parts):
    with pytest.raises(ConfigError) as error:
        apply_overrides(RUN, [assignment])
    message = str(error.value)
    assert "\n" not in message
    for part in parts:
        assert part in message


def test_a_part_that_is_absent_has_no_fields():
    dense = dataclasses.replace(RUN, model=dataclasses.replace(MODEL, moe=None, first_dense_layers=4))
    with pytest.raises(ConfigError, match=r"model\.moe is None, which has no fields; set model\.moe itself"):
        apply_overrides(dense, ["model.moe.top_k=1"])
    moe = "model.moe=MoEConfig(num_experts=8, top_k=2, latent_dim=16, expert_dim=24, shared_dim=48)"
    assert apply_overrides(dense, [moe, "model.first_dense_layers=1"]) == RUN


class TestJson:
    @pytest.mark.parametrize(
        "config",
        [
            RUN,
            dataclasses.replace(
                RUN,
                optimizer=OptimizerConfig(0.1, schedule=WarmupStableDecay(0.1 + 0.2), qk_clip=1e2, grad_clip=math.inf),
                train=TrainConfig(steps=3, context_stages=(ContextStage(0.25, 64), ContextStage(0.5, 256))),
                data=DataConfig(128, 8, source='a "b" é'),
            ),
            MODEL,
            dataclasses.replace(MODEL, moe=None, first_dense_layers=4),
            dataclasses.replace(MODEL, kda=KDAConfig(2, 8, gate_lower_bound=None)),
        ],
    )
    def test_round_trip_is_exact(self, config):
        again = from_json(type(config), json.loads(json.dumps(to_json(config))))
        assert again == config and hash(again) == hash(config)
        assert to_json(again) == to_json(config)

    def test_a_union_says_which_it_is(self):
        assert to_json(RUN)["optimizer"]["schedule"] == {"type": "Cosine", "min_ratio": 0.1}
        assert "type" not in to_json(RUN)["model"]["moe"]

    def test_fields_left_out_take_their_defaults(self):
        data = to_json(RUN)
        del data["train"]["keep"], data["mesh"], data["optimizer"]["schedule"]
        assert from_json(RunConfig, data) == RUN

    @pytest.mark.parametrize(
        ("path", "value", "message"),
        [
            ("optimizer.lerning_rate", 1, r"optimizer\.lerning_rate: OptimizerConfig has no such field; did you mean"),
            ("train.steps", 2.5, r"train\.steps = 2\.5: expected an integer"),
            ("train.steps", None, r"train\.steps = None: expected an integer"),
            ("model.kda", None, r"model\.kda = None: expected KDAConfig\(\.\.\.\)"),
            ("model.mla_layers", [9], r"K3Config\.mla_layers = \(9,\)"),
            ("optimizer.schedule", {"min_ratio": 0.1}, r"optimizer\.schedule\.type = None: expected Cosine or Warm"),
            ("model", {}, r"model\.vocab_size is missing: expected an integer"),
        ],
    )
    def test_bad_data_is_named(self, path, value, message):
        data = to_json(RUN)
        *parents, last = path.split(".")
        part = data
        for name in parents:
            part = part[name]
        part[last] = value
        with pytest.raises(ConfigError, match=message):
            from_json(RunConfig, data)

    def test_not_an_object(self):
        with pytest.raises(ConfigError, match="RunConfig = 3: expected an object"):
            from_json(RunConfig, 3)


class TestDifferences:
    def test_each_field_is_one_line(self):
        other = apply_overrides(RUN, ["optimizer.learning_rate=2e-3", "model.kda.head_dim=16", "data.source=x"])
        assert differences(RUN, other) == [
            "model.kda.head_dim: 8 != 16",
            "data.source: 'stdlib' != 'x'",
            "optimizer.learning_rate: 0.001 != 0.002",
        ]

    def test_of_json(self):
        other = to_json(apply_overrides(RUN, ["optimizer.schedule=WarmupStableDecay()", "model.mla_layers=(2,)"]))
        del other["train"]["keep"]
        assert differences(to_json(RUN), other) == [
            "model.mla_layers: [3] != [2]",
            "optimizer.schedule: {'type': 'Cosine', 'min_ratio': 0.1} != "
            "{'type': 'WarmupStableDecay', 'decay_fraction': 0.2, 'min_ratio': 0.0}",
            "train.keep: 2 != (absent)",
        ]
        assert differences(to_json(RUN), json.loads(json.dumps(to_json(RUN)))) == []

    def test_none_for_equal_ones(self):
        assert differences(RUN, apply_overrides(RUN, [])) == []

    def test_parts_of_another_class_are_shown_whole(self):
        other = apply_overrides(RUN, ["optimizer.schedule=WarmupStableDecay()"])
        (line,) = differences(RUN, other)
        assert line == f"optimizer.schedule: {Cosine()!r} != {WarmupStableDecay()!r}"
