"""JoinedOptimizer: groups, states and hooks of several optimizers."""

import pytest
import torch
from torch import nn

from hdet.tensors.joined_optimizer import JoinedOptimizer, kinds_of, members_of, parameter_ids


def pair() -> tuple[list[nn.Parameter], torch.optim.SGD, torch.optim.Adam]:
    weights = [nn.Parameter(torch.ones(2)) for _ in range(3)]
    groups = [{"params": [weights[1]]}, {"params": [weights[2]]}]
    return weights, torch.optim.SGD(weights[:1], lr=0.1), torch.optim.Adam(groups, lr=0.2)


def test_groups_are_those_of_all_members_also_after_a_member_loads_a_state() -> None:
    weights, sgd, adam = pair()
    joined = JoinedOptimizer([sgd, adam])
    adam.load_state_dict(adam.state_dict())  # torch replaces the groups
    assert [group["lr"] for group in joined.param_groups] == [0.1, 0.2, 0.2]
    joined.param_groups[2]["lr"] = 0.5
    assert adam.param_groups[1]["lr"] == 0.5
    assert parameter_ids(joined) == set(map(id, weights))
    assert kinds_of(joined) == "SGD + Adam" and kinds_of(sgd) == "SGD"
    assert members_of(joined) == (sgd, adam) and members_of(sgd) == (sgd,)


def test_hooks_run_for_each_member_until_they_are_removed() -> None:
    _, sgd, adam = pair()
    joined = JoinedOptimizer([sgd, adam])
    seen: list[tuple[str, object]] = []
    handles = [
        joined.register_step_pre_hook(lambda one, *_: seen.append(("pre", one))),
        joined.register_step_post_hook(lambda one, *_: seen.append(("post", one))),
        joined.register_load_state_dict_post_hook(lambda one: seen.append(("load", one))),
    ]
    joined.step()
    joined.load_state_dict(joined.state_dict())
    both = [(word, one) for one in (sgd, adam) for word in ("pre", "post")]
    assert seen == [*both, ("load", sgd), ("load", adam)]
    for handle in handles:
        handle.remove()
    joined.step()
    assert len(seen) == 6


def test_it_steps_clears_saves_and_loads_all_members() -> None:
    weights, sgd, adam = pair()
    joined = JoinedOptimizer([sgd, adam])
    for weight in weights:
        weight.grad = torch.ones(2)
    joined.step()
    assert [float(weight[0].detach()) for weight in weights] == pytest.approx([0.9, 0.8, 0.8])
    joined.zero_grad()
    assert all(weight.grad is None for weight in weights)
    _, *others = pair()
    JoinedOptimizer(others).load_state_dict(joined.state_dict())
    assert others[1].state_dict()["state"][0]["step"] == 1


def test_it_refuses_a_new_group_which_would_belong_to_no_member() -> None:
    _, sgd, adam = pair()
    with pytest.raises(ValueError, match="must be called on one of the optimizers"):
        JoinedOptimizer([sgd, adam]).add_param_group({"params": [nn.Parameter(torch.ones(1))]})
