import pytest
import torch

import loop
from guard import UserError


def test_bad_steps_in_a_row_count_for_each_expert(capsys):
    """One whose steps are all bad isn't hidden by the other's good ones."""
    parameter = torch.nn.Parameter(torch.ones(1))
    steps = loop.OptimizerSteps(torch.optim.SGD([parameter], lr=0.5), {"x": parameter}, 9.0, max_bad_steps=3, skipped=4)

    def step(experts, loss):
        parameter.grad = torch.full((1,), loss)
        return steps.step(loss, experts, "step 1", lambda: "demo_3")

    nan = float("nan")
    assert step({"high"}, 1.0) == (1.0, True) and parameter.item() == 0.5
    assert not step(["low"], nan)[1] and step(["high"], 1.0)[1] and not step({"low", "high"}, nan)[1]
    assert step(["high"], 1.0)[1] and steps.in_a_row == {"high": 0, "low": 2} and steps.skipped == 6
    with pytest.raises(UserError, match="step 1: 3 non-finite steps in a row of expert low, the last one's in demo_3"):
        step(["low"], nan)
    assert parameter.item() == -0.5 and parameter.grad is None  # three of 0.5 were taken
    assert capsys.readouterr().out.count("skipped on all ranks; not finite: demo_3\n") == 3
    assert loop.due(5, 10, 99) and loop.due(0, 99, 99) and not loop.due(0, 10, 99) and not loop.due(5, 9, 99)
