"""Every logged number by name: its unit, its meaning, and what other frameworks call it.

`python -m simlab.core.columns > docs/results.md` writes the page. Both worlds log these names, and no
method may give a diagnostic of its own one of them (METHOD aside, which are the diagnostics there are).
"""

from __future__ import annotations

from typing import NamedTuple


class Column(NamedTuple):
    unit: str
    meaning: str  # d = log pi - log mu of a sampled token, r = exp(d)
    elsewhere: str = ""  # the same number in verl, prime-rl, TRL, slime, SkyRL and others


RUN = {
    "experiment": Column(
        "", "experiment and its version; `-changed` where settings differ from it"
    ),
    "version": Column("", "of simlab"),
    "commit": Column("", "of the code that ran; ends in `-dirty` if files differed from it"),
    "config": Column("", "digest of settings and source behind the row"),
    "arm": Column("", "label of the arm"),
    "method": Column("", "name of the stabilizer"),
    "arguments": Column("", "its arguments that are not the default"),
    "lag": Column("", "lag regime, as written in the settings"),
    "replay": Column("", "routing replay: none, r2 or r3 (real engines)"),
    "seed": Column("", "runs of one seed are paired over arms"),
    "step": Column("steps", "optimizer steps before the row"),
}
MISMATCH = {
    "tokens": Column("tokens", "sampled tokens of the batch that are not masked"),
    "d_bar": Column(
        "nats", "mean of \\|d\\|",
        "slime `train_rollout_logprob_abs_diff`, TRL `sampling/sampling_logp_difference/mean`, "
        "SkyRL `policy/rollout_train_logprobs_abs_diff_mean`; verl's `rollout_probs_diff_mean` is in probabilities",
    ),
    "d_mean": Column("nats", "mean of d", "minus verl and slime `kl` of the rollout correction"),
    "d_q50": Column("nats", "median of \\|d\\| (inverse CDF)"),
    "d_q90": Column("nats", "90 % quantile of \\|d\\|"),
    "d_q99": Column("nats", "99 % quantile of \\|d\\|"),
    "d_max": Column(
        "nats", "largest \\|d\\|",
        "TRL `sampling/sampling_logp_difference/max`, SkyRL `policy/rollout_train_logprobs_abs_diff_max`",
    ),
    "d_kurtosis": Column("", "E(d - Ed)^4 / Var(d)^2; 3 for a Gaussian"),
    "d_policy": Column("nats", "mean of \\|log pi now - log pi at the weights that sampled\\|"),
    "d_engine": Column("nats", "mean of \\|log pi at the weights that sampled - log mu\\|"),
    "k1": Column("nats", "mean of -d, estimates KL(mu \\|\\| pi)", "verl, slime `kl` of the rollout correction"),
    "k2": Column("nats", "mean of d^2 / 2"),
    "k3": Column("nats", "mean of r - 1 - d", "verl, slime `k3_kl`, prime-rl `mismatch_kl`, AReaL `rollout_train_k3_kl`"),
    "chi2": Column("", "mean of r^2, minus 1", "verl, slime `chi2_token`"),
    "ess": Column(
        "fraction", "(sum r)^2 / (n sum r^2)", "verl `rollout_is_eff_sample_size`, torchrl `ESS`"
    ),
    "age": Column(
        "steps", "mean of optimizer steps since the weights that sampled the token (staleness)",
        "verl `off_policy/trajectory_staleness`, prime-rl `off_policy/mean`, AReaL `sample_staleness`, "
        "SkyRL `async/staleness_mean`, NeMo-RL `avg_trajectory_age`; per trajectory there",
    ),
    "age_max": Column("steps", "largest age", "prime-rl `off_policy/max`, SkyRL `async/staleness_max`"),
}  # fmt: skip
GRADIENT = {
    "active": Column("fraction", "tokens whose log-prob gets a gradient"),
    "cut": Column(
        "fraction", "tokens with an advantage and no gradient: clipped, masked or dropped",
        "verl, slime `pg_clipfrac`, OpenRLHF `ppo_clip_ratio`, prime-rl `is_masked`, for their own method",
    ),
    "unlike_ppo": Column("fraction", "tokens that get a gradient where PPO at 0.2/0.2 gives none, or the other way round"),
    "loss": Column("reward", "minus the aggregated surrogate, KL term included"),
    "grad_norm": Column("", "norm of the whole gradient before clipping"),
    "grad_cosine": Column("", "cosine of this step's gradient and the one before, GAC's diagnostic; missing at the first step, and at the first of a resumed run (real engines: world.trainer.grad_cosine)"),
    "skipped_steps": Column("steps", "steps so far whose gradient was not finite (simulator)"),
    "updated": Column("", "false where the gradient was not finite and nothing changed (real engines)"),
    "kl": Column("nats", "the KL term of the loss, where it has one", "TRL `kl`, slime `kl_loss`"),
    "reward": Column("reward", "mean over the sampled answers of the batch"),
    "flat_groups": Column("fraction", "groups whose answers all got one reward, which teach nothing"),
}  # fmt: skip
EXACT = {
    "J": Column("reward", "exact expected reward of pi, sampling error none"),
    "J_mu": Column("reward", "exact expected reward of mu"),
    "L_prime": Column("reward", "first-order surrogate of SAT (3)"),
    "remainder": Column("reward", "L' - (J - J_mu), what a penalty must cover (31)"),
    "tv_sum": Column("", "expected sum over positions of TV(mu, pi), S of the formulas"),
    "tv_max": Column("", "largest TV at a state that mu reaches, D_max of the formulas"),
    "penalty_mean": Column("reward", "4 xi tv_sum, the average form (34)"),
    "penalty_max": Column("reward", "2 xi T (T - 1) tv_max^2, the max form (33)"),
}
ENGINES = {
    "length": Column("tokens", "mean length of an answer"),
    "entropy": Column("nats", "mean entropy of pi at the sampled states", "TRL, verl `entropy`"),
    "screened": Column("numbers", "non-finite numbers that engines returned; their tokens are masked"),
    "samples": Column("", "digest of the sampled tokens"),
    "micro_batches": Column("", "micro-batches of the step, over all ranks"),
    "queue": Column("batches", "answers that wait for a later step"),
    "in_flight": Column("answers", "being sampled while the step trains"),
    "served": Column("version", "weights that the engines hold"),
    "aborted": Column("answers", "ended by the engine"),
    "seconds": Column("s", "since the start of the run"),
    "engine_busy": Column("fraction", "of the time in which engines sample"),
    "trainer_busy": Column("fraction", "of the time in which the trainer trains"),
    "engine_restarts": Column("", "engines started anew so far"),
    "avg_at_k": Column("fraction", "mean score of an evaluation; `_low`, `_high`: 95 % over problems; `_noise`: of sampling alone"),
}  # fmt: skip
SUMMARY = {
    "seeds": Column("runs", "behind the row"),
    "first": Column("reward", "mean score of the first step (real engines)"),
    "final": Column("reward", "mean score over the last eighth of the logged steps; the score is J in the simulator, the reward on engines"),
    "peak": Column("reward", "the best score that a run had, on engines over a window as long as that of `final`"),
    "bar": Column("reward", "final below which a run failed: 0.7 of the median final of the reference's draws at the healthy lag"),
    "failed": Column("runs", "whose final is below the bar (in runs.parquet: whether it is)"),
    "fail": Column("fraction", "the same, with an exact 95 % binomial interval"),
    "fail_reference": Column("fraction", "of the runs of the reference's other draws that failed"),
    "risk_p": Column("", "p-value of the exact test that both fail as often, Holm-corrected for the table"),
    "risk": Column("", "fails less, fails more, not separated, or reference"),
    "compared": Column("seeds", "on which neither the arm nor all draws of the reference failed"),
    "gain": Column("reward", "final minus that of the reference's first draw that lived on those, mean over seeds, with an interval by sign flips for all comparisons of the table at once"),
    "gain_p": Column("", "its p-value, for all comparisons of the table at once"),
    "typical": Column("reward", "final minus a median of the reference's draws on those, median over seeds, with an exact interval for all comparisons of the table at once"),
    "level": Column("", "above, below, not separated, too few lived, or reference"),
    "iqm": Column("reward", "interquartile mean of the finals, with a 95 % percentile bootstrap (rliable)"),
    "improvement": Column("fraction", "P(a run ends above one of the reference's other draws), ties half, with a 95 % percentile bootstrap (rliable)"),
    "idle": Column("fraction", "logged batches whose tokens without gradient are those of PPO at 0.2/0.2; a rule that weights tokens acts all the same"),
    "still": Column("fraction", "logged steps with a gradient of exactly 0; at 1 nothing was trained"),
    "empty": Column("fraction", "logged batches without a token; at 1 all was masked and there is no data"),
    "seeds_alike": Column("", "all seeds have the very same numbers: they are one run"),
    "shift_seen": Column("reward", "shift of the level that a typical comparison of the table sees four times in five"),
    "failures_seen": Column("runs", "of the reference, in as many as there are seeds, against which no failure at all is seen four times in five"),
    "collapsed": Column("runs", "whose final is below 0.7 of their peak"),
    "collapse": Column("fraction", "the same, with an exact 95 % binomial interval"),
    "diverged": Column("runs", "that ended with numbers that are not finite"),
    "vacuous_mean": Column("fraction", "logged steps on which the average form says nothing"),
    "vacuous_max": Column("fraction", "logged steps on which the max form says nothing"),
    "bound_violations": Column("steps", "on which the remainder was above the smaller penalty"),
    "same_as_reference": Column("", "every logged number is the reference's: the rule never acted (or nothing was trained)"),
}  # fmt: skip
METHOD = {
    "clip_high": Column("fraction", "tokens with A > 0 above the upper limit", "TRL `clip_ratio/high_mean`"),
    "clip_low": Column("fraction", "tokens with A < 0 below the lower limit", "TRL `clip_ratio/low_mean`"),
    "clip_dual": Column("fraction", "tokens with A < 0 above the dual clip", "verl `pg_clipfrac_lower`"),
    "overflow": Column("fraction", "tokens whose ratio is held, without gradient"),
    "capped": Column("fraction", "weights held at a cap", "slime `tis_clipfrac`"),
    "out_of_band": Column("fraction", "tokens outside a band", "verl `rollout_is_oob_ratio`"),
    "rejected": Column("fraction", "tokens of rejected responses", "verl `rollout_rs_masked_fraction`"),
    "dropped": Column("fraction", "tokens of dropped responses", "slime `opsm_clipfrac`"),
    "accepted": Column("fraction", "tokens that rejection sampling accepts"),
    "held_back": Column("fraction", "tokens of highest covariance that a penalty holds back"),
    "gate_rate": Column("fraction", "tokens that SAT's gate contracts"),
    "radius_low": Column("", "mean radius below 1"),
    "radius_high": Column("", "mean radius above 1"),
    "c_min": Column("", "smallest contraction"),
    "q": Column("nats", "SAT's quantile of \\|d\\|"),
    "reversed": Column("fraction", "tokens whose gradient changed its sign"),
    "damped": Column("fraction", "mean of the soft gate"),
    "held": Column("fraction", "tokens held at the largest ratio"),
    "untouched": Column("fraction", "tokens that no factor changes"),
    "limit": Column("", "ESTR's limit"),
    "tau": Column("nats", "M2PO's bound on \\|d\\|"),
    "D": Column("", "VACO's divergence"),
    "lr_factor": Column("", "VCPO's factor on the learning rate"),
    "baseline": Column("reward", "VCPO's baseline"),
    "centered": Column("", "sum of \\|c_v\\| over the head: size of what score centering subtracts"),
    "projected": Column("fraction", "tokens at whose state TROLL projects the policy"),
    "head_mass": Column("fraction", "mass of mu in the head"),
    "scale_min": Column("", "smallest scale of a response"),
    "scale_max": Column("", "largest scale of a response"),
}  # fmt: skip
SECTIONS = {
    "Which run": (RUN, "results.parquet of both worlds"),
    "Mismatch": (MISMATCH, "results.parquet and metrics.jsonl of both worlds"),
    "Gradient and reward": (GRADIENT, "results.parquet and metrics.jsonl"),
    "Exact numbers": (EXACT, "results.parquet of the simulator"),
    "Real engines": (ENGINES, "metrics.jsonl and results.parquet of real engines"),
    "Summary": (
        SUMMARY,
        "summary.csv of both worlds, with means of columns above; `_low`, `_high`: an interval",
    ),
    "Diagnostics of methods": (METHOD, "of the methods that report them"),
}
# names that no method may give a diagnostic
LOGGED = frozenset(
    name for part, _ in SECTIONS.values() if part not in (SUMMARY, METHOD) for name in part
)


def markdown() -> str:
    """docs/results.md."""
    lines = [
        "# Columns of the results",
        "",
        "Written by `python -m simlab.core.columns`. d = log pi - log mu of a sampled token, pi the policy in "
        "training, mu the one that sampled; r = exp(d). Means are over the tokens that are not masked, of all "
        "micro-batches and ranks. The last column names the same number in other frameworks.",
    ]
    for title, (columns, where) in SECTIONS.items():
        lines += ["", f"## {title}", "", f"In {where}.", ""]
        lines += ["| column | unit | meaning | elsewhere |", "| --- | --- | --- | --- |"]
        lines += [
            f"| `{name}` | {x.unit or '-'} | {x.meaning} | {x.elsewhere or '-'} |"
            for name, x in columns.items()
        ]
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    print(markdown(), end="")
