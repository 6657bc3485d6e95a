"""grpo_checks.py: what each check lets pass and what it stops. (Its lines in a run: test_grpo.py.)"""

from types import SimpleNamespace

import pytest
import torch

import grpo_checks
from guard import UserError

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def transitions(*log_probs):
    return [SimpleNamespace(index=3 + i, log_prob=torch.tensor(values)) for i, values in enumerate(log_probs)]


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
