"""grpo_checks.py: what each check lets pass and what it stops. (Its lines in a run: test_grpo.py.)"""

from types import SimpleNamespace

import pytest
import torch

import grpo_checks
from guard import UserError

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def transitions(*log_probs):
    return [SimpleNamespace(index=3 + i, log_prob=torch.tensor(values)) for i, values in enumerate(log_probs)]


SETTINGS = dict(law="flow", noise_level=0.7, num_steps=10, num_sde_steps=2, sde_window=(0, 5), ratio_norm=False,
                warmup_iterations=0, max_iterations=5, prompts_per_iteration=3, group_size=4, rollout_batch=6,
                num_minibatches=1, ema_decay=0.5, clip_range=1e-3, reward_timeout=60.0, dtype="float32")


def refusal_of(config, world_size=1):
    try:
        grpo_checks.check_settings(config, world_size)
    except UserError as error:
        return str(error)
    return ""


def test_all_mistakes_in_settings_are_told_at_once(tmp_path):
    assert refusal_of(SETTINGS) == refusal_of(SETTINGS, 2) == ""
    wrong = dict(ema_decay=1.0, clip_range=0.0, dtype="half", noise_level=1.2, law="cps", ratio_norm=True,
                 sde_window=(8, 10), warmup_iterations=6)
    lines = ["clip_range=0.0: want more than 0", "ema_decay=1.0: want below 1", "dtype=half: want float32 or bfloat16",
             "noise_level=1.2: an SDE wants more than 0, e.g. 0.7, and cps at most 1",
             "sde_window=(8, 10): want (lo, hi), lo >= 0, hi <= 9, at least num_sde_steps=2 apart",
             "ratio_norm=True: its correction is for Gaussian log-probs; want law=flow or dance",
             "warmup_iterations=6: want at most max_iterations=5, the whole run"]
    assert refusal_of(SETTINGS | wrong) == "; ".join(lines)
    videos = "prompts_per_iteration x group_size = 12 videos: want a multiple of "
    assert refusal_of(SETTINGS, 4) == f"{videos}4 ranks x rollout_batch=6, e.g. rollout_batch=3"
    assert refusal_of(SETTINGS, 5) == f"{videos}5 ranks x rollout_batch=6"
    assert refusal_of(SETTINGS | dict(num_minibatches=3), 2) == (
        "num_minibatches=3: want at most 2, a rank's batches of rollout_batch videos x num_sde_steps")
    assert refusal_of(SETTINGS | dict(rollout_batch=0)) == "rollout_batch=0: want at least 1"
    (tmp_path / "few.jsonl").write_text("{}\n\n{}\n")
    assert refusal_of(SETTINGS | dict(data_jsonl=tmp_path / "few.jsonl", clip_range=0)) == (
        "clip_range=0: want more than 0; prompts_per_iteration=3: want 1 to 2, all there are")
    for content in ("{}\n{}\n{}", ""):  # an empty one is told by Prompts
        (tmp_path / "few.jsonl").write_text(content)
        assert refusal_of(SETTINGS | dict(data_jsonl=tmp_path / "few.jsonl")) == ""


@pytest.mark.parametrize("deleted", [{name} for name in SETTINGS] + [set(SETTINGS)])
def test_what_a_fork_has_deleted_is_not_asked_for(deleted):
    left = {name: value for name, value in SETTINGS.items() if name not in deleted}
    assert refusal_of(left) == "" and refusal_of(left | dict(mine=-1)) == ""
    wrong = dict(noise_level=0, warmup_iterations=-1, sde_window=(5, 4), rollout_batch=5, ema_decay=1, dtype="half")
    told = refusal_of({name: value for name, value in (SETTINGS | wrong).items() if name not in deleted})
    told = [line.split(":")[0] for line in told.split("; ") if line]
    wanted = {"warmup_iterations=-1": {"warmup_iterations"}, "ema_decay=1": {"ema_decay"}, "dtype=half": {"dtype"},
              "noise_level=0": {"noise_level"}, "sde_window=(5, 4)": {"sde_window"},
              "prompts_per_iteration x group_size = 12 videos": {"prompts_per_iteration", "group_size",
                                                                 "rollout_batch"}}
    assert told == [line for line, needed in wanted.items() if not needed & deleted]


def test_the_first_ratio():
    stored = transitions([-1.0, -2.0], [-3.0, -4.0])
    line = grpo_checks.check_first_ratio(lambda t: t.log_prob.clone(), stored, 1e-4, {})
    assert line == "self-check ratio of the first update: 1 +- 0.0e+00 (step 3), 0.0e+00 (step 4); clip_range 0.0001"

    def log_prob(t):  # one video of one step is a little more probable
        return t.log_prob + torch.tensor([0.0, 0.01]) * (t.index == 4)

    drift = {"drift/ratio": 0.5}
    line = grpo_checks.check_first_ratio(log_prob, stored, 0.02, drift)
    assert "0.0e+00 (step 3), 1.0e-02 (step 4)" in line and line.endswith("it would be 1 +- 5.0e-01")
    with pytest.raises(UserError, match=r"differ from 1 by 1.0e-02, .* set recompute_log_prob=True, .*\(step 4\)"):
        grpo_checks.check_first_ratio(log_prob, stored, 1e-3, {})
    with pytest.raises(UserError, match="set a larger one"):
        grpo_checks.check_first_ratio(log_prob, stored, 1e-3, drift)
    with pytest.raises(UserError, match="differ from 1 by inf"):
        grpo_checks.check_first_ratio(lambda t: t.log_prob * float("nan"), stored, 1e-3, {})


@pytest.mark.parametrize("kept", [None, 2.0])
def test_the_reference(kept):
    before = {"high.x.lora_B.default.weight": 0.0 if kept is None else torch.full((2,), kept)}
    start = torch.zeros(2) if kept is None else torch.full((2,), kept)
    parameters = {name: torch.nn.Parameter(start.clone()) for name in before}
    (parameter,) = parameters.values()

    def mean():
        return 3 * parameter

    assert grpo_checks.check_reference(mean, parameters, before) == (
        "self-check reference against policy: 0.0e+00, want 0")
    assert torch.equal(parameter.data, start)
    with pytest.raises(RuntimeError, match="a nudge moves it by 0.0e"):  # adapters that nothing depends on
        grpo_checks.check_reference(lambda: torch.ones(2), parameters, before)
    parameter.data += 0.5
    assert grpo_checks.check_reference(mean, parameters, before) == (
        "self-check reference against policy: 1.5e+00, want more than 0")
    assert torch.equal(parameter.data, start + 0.5)
    with pytest.raises(RuntimeError, match="0.0e.00, want more than 0"):  # switching them off changes nothing
        grpo_checks.check_reference(lambda: torch.ones(2), parameters, before)


def test_servers_draw_and_the_trainer_scores_again(monkeypatch):
    """The forwards without a backward that a rank of two has in an iteration: 6 guided videos, 10 steps, 2 trained."""
    asked = []
    monkeypatch.setattr(grpo_checks.cost, "describe_run", lambda *args, **more: asked.append((args, more)) or [])
    config = SETTINGS | dict(shift=5.0, num_inner_epochs=3)
    for change, forwards in ((dict(), 12 * 10), (dict(recompute_log_prob=True), 12 * (10 + 2)),
                             (dict(rollout="sglang"), 12 * 2)):
        lines = grpo_checks.describe_run(config | change, SimpleNamespace(expert_names=("single",)), (48, 2, 4, 4),
                                         dict(guidance_scale=5.0, guidance_scale_2=1.0), torch.ones(2), None, 2)
        args, more = asked.pop()
        assert more == dict(reference=False, forwards=forwards) and args[5:] == (6 * 2, 6 * 2 * 2 * 3, 5, 1)
        assert lines[1].endswith("8 tokens a video, 6 videos a rank")
