"""Learning-rate curves at their corners."""

import dataclasses

import pytest

from k3_jax.config import ConfigError, Cosine, OptimizerConfig, WarmupStableDecay
from k3_jax.train.schedule import learning_rate

COSINE = OptimizerConfig(learning_rate=2.0, schedule=Cosine(min_ratio=0.1))
STABLE = dataclasses.replace(COSINE, schedule=WarmupStableDecay(decay_fraction=0.2, min_ratio=0.05))


def curve(config, total):
    schedule = learning_rate(config, total)
    return lambda step: float(schedule(step))


def test_cosine():
    value = curve(COSINE, 1000)
    assert value(0) == 0
    assert value(5) == pytest.approx(1.0)
    assert value(10) == pytest.approx(2.0)
    assert value(505) == pytest.approx(2.0 * 0.55)  # half-way between the peak at 1 % and the end
    assert value(500) == pytest.approx(2.0 * 0.55, rel=0.02)
    assert value(1000) == pytest.approx(0.2)
    assert value(5000) == pytest.approx(0.2)


def test_warmup_stable_decay():
    value = curve(STABLE, 1000)
    assert value(0) == 0
    assert value(10) == value(500) == value(800) == pytest.approx(2.0)
    assert value(900) == pytest.approx(2.0 * 0.525)
    assert value(1000) == value(2000) == pytest.approx(0.1)


@pytest.mark.parametrize("config", [COSINE, STABLE])
@pytest.mark.parametrize("total", [1, 2, 7, 99])
def test_short_runs_have_a_positive_rate_from_the_first_update_on(config, total):
    value = curve(config, total)
    assert all(0 < value(step) <= 2.0 for step in range(1, total + 1))


def test_what_does_not_fit():
    too_long = dataclasses.replace(STABLE, schedule=WarmupStableDecay(decay_fraction=1.0), warmup_fraction=0.1)
    with pytest.raises(ConfigError, match="decay_fraction = 1.0: expected at most .* 0.9"):
        learning_rate(too_long, 1000)
    with pytest.raises(ConfigError, match="total_steps = 0"):
        learning_rate(COSINE, 0)
