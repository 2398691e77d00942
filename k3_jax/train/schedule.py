"""Learning-rate schedules: functions of the number of updates done, counting the one being made.

K3 trained with a cosine and 1 % of linear warm-up down to a fixed minimum (report §3.3; the minimum is not disclosed).
Warm-up, constant rate, then a decay (WSD) is the choice for runs whose length is not known at the start.
"""

import optax

from k3_jax.config import ConfigError, Cosine, OptimizerConfig, WarmupStableDecay


def learning_rate(config: OptimizerConfig, total_steps: int) -> optax.Schedule:
    """Step -> learning rate: 0 at step 0, the peak after the warm-up, peak * min_ratio at `total_steps`.

    Update number n (from 1) is made with the value at n, so the first one already moves the weights.
    Raises ConfigError if warm-up and decay do not fit into the run.
    """
    if total_steps < 1:
        raise ConfigError(f"total_steps = {total_steps}: expected at least 1")
    warmup = min(round(config.warmup_fraction * total_steps), total_steps - 1)
    after = _after_warmup(config.schedule, config.learning_rate, total_steps - warmup, total_steps)
    if warmup == 0:
        return after
    return optax.join_schedules([optax.linear_schedule(0.0, config.learning_rate, warmup), after], [warmup])


def _after_warmup(shape: Cosine | WarmupStableDecay, peak: float, steps: int, total_steps: int) -> optax.Schedule:
    match shape:
        case Cosine(min_ratio=ratio):
            return optax.cosine_decay_schedule(peak, steps, alpha=ratio)
        case WarmupStableDecay(decay_fraction=fraction, min_ratio=ratio):
            decay = max(1, round(fraction * total_steps))
            if decay > steps:
                raise ConfigError(
                    f"WarmupStableDecay.decay_fraction = {fraction}: expected at most 1 - warmup_fraction, "
                    f"here {steps / total_steps:.3g}"
                )
            fall = optax.linear_schedule(peak, ratio * peak, decay)
            return optax.join_schedules([optax.constant_schedule(peak), fall], [steps - decay])
