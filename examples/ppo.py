"""PPO on a small corridor, with hdet in the lines marked so.

python examples/ppo.py

The agent walks to the right end of a corridor. The loop is that of CleanRL: rollouts, advantages,
epochs of minibatches, and a learning rate that falls with every update. The loss of PPO does not
fall when the policy improves. So the guard is off, and the scout compares policies by their return.
"""

import argparse
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributions import Categorical

import hdet  # hdet

LENGTH, LIMIT, WORKERS, ROLLOUT = 8, 32, 16, 32
EPOCHS, MINIBATCHES = 4, 4
DISCOUNT, SMOOTHING, CLIP = 0.97, 0.95, 0.2
STEPS_PER_UPDATE = EPOCHS * MINIBATCHES


class Corridor:
    """Workers in corridors: each starts anywhere, and a step costs 0.1 until the right end."""

    def __init__(self, workers: int, seed: int) -> None:
        self.draw = torch.Generator().manual_seed(seed)
        self.place = torch.randint(LENGTH - 1, (workers,), generator=self.draw)
        self.age = torch.zeros(workers, dtype=torch.long)

    def observe(self) -> Tensor:
        return nn.functional.one_hot(self.place, LENGTH).float()

    def step(self, action: Tensor) -> tuple[Tensor, Tensor]:
        """Move; return the rewards, and whether an episode is over."""
        self.place = (self.place + 2 * action - 1).clamp(min=0)
        self.age += 1
        arrived = self.place == LENGTH - 1
        done = arrived | (self.age >= LIMIT)
        fresh = torch.randint(LENGTH - 1, self.place.shape, generator=self.draw)
        self.place = torch.where(done, fresh, self.place)
        self.age = torch.where(done, 0, self.age)
        return arrived.float() - 0.1, done


class Agent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(LENGTH, 32), nn.Tanh())
        self.actor, self.critic = nn.Linear(32, 2), nn.Linear(32, 1)

    def forward(self, seen: Tensor) -> tuple[Categorical, Tensor]:
        features = self.body(seen)
        return Categorical(logits=self.actor(features)), self.critic(features).squeeze(-1)


class Rollout(NamedTuple):
    """What the workers saw and did, and what it was worth."""

    seen: Tensor
    action: Tensor
    log_prob: Tensor
    advantage: Tensor
    target: Tensor


@torch.no_grad()
def score(agent: nn.Module) -> Tensor:
    """Return the mean cost of a step for each of 64 workers: lower is better."""
    corridor, draw = Corridor(64, seed=1), torch.Generator().manual_seed(1)
    cost = torch.zeros(64)
    for _ in range(2 * LIMIT):
        policy, _ = agent(corridor.observe())
        reward, _ = corridor.step(torch.multinomial(policy.probs, 1, generator=draw).squeeze(1))
        cost -= reward
    return cost / (2 * LIMIT)


@torch.no_grad()
def roll_out(agent: Agent, corridor: Corridor) -> Rollout:
    rows = []
    for _ in range(ROLLOUT):
        seen = corridor.observe()
        policy, value = agent(seen)
        action = policy.sample()
        rows.append((seen, action, policy.log_prob(action), value, *corridor.step(action)))
    seen, action, log_prob, value, reward, done = map(torch.stack, zip(*rows, strict=True))
    following, last = agent(corridor.observe())[1], torch.zeros(WORKERS)
    advantage = torch.zeros_like(value)
    for t in reversed(range(ROLLOUT)):
        goes_on = 1.0 - done[t].float()
        surprise = reward[t] + DISCOUNT * following * goes_on - value[t]
        advantage[t] = last = surprise + DISCOUNT * SMOOTHING * goes_on * last
        following = value[t]
    parts = (seen, action, log_prob, advantage, advantage + value)
    return Rollout(*(part.flatten(0, 1) for part in parts))


def loss_of(agent: Agent, part: Rollout) -> Tensor:
    policy, value = agent(part.seen)
    ratio = (policy.log_prob(part.action) - part.log_prob).exp()
    advantage = (part.advantage - part.advantage.mean()) / (part.advantage.std() + 1e-8)
    gain = torch.min(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage)
    value_loss = (value - part.target).square().mean()
    entropy = policy.entropy().mean()
    loss: Tensor = -gain.mean() + 0.25 * value_loss - 0.01 * entropy
    return loss


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--updates", type=int, default=100)
    parser.add_argument("--lr", type=float, default=1e-5, help="far too low, on purpose")
    arguments = parser.parse_args()

    torch.manual_seed(0)
    agent, corridor = Agent(), Corridor(WORKERS, seed=0)
    optimizer = torch.optim.Adam(agent.parameters(), lr=arguments.lr, eps=1e-5)
    steps = arguments.updates * STEPS_PER_UPDATE

    def get_lr(step: int) -> float:
        update = step // STEPS_PER_UPDATE
        return float(arguments.lr * (1 - update / arguments.updates))

    scheduler = hdet.HDET(  # hdet
        optimizer, schedule=get_lr, total_steps=steps, model=agent, probe=score, guard=None
    )
    for update in range(arguments.updates):
        rollout = roll_out(agent, corridor)
        for _ in range(EPOCHS):
            for rows in torch.randperm(len(rollout.seen)).chunk(MINIBATCHES):
                loss = loss_of(agent, Rollout(*(part[rows] for part in rollout)))
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
                optimizer.step()
                scheduler.step(loss)  # hdet: was group["lr"] = get_lr(step) in every update
        if (update + 1) % 10 == 0:
            lr = scheduler.get_last_lr()[0]
            reward = -score(agent).mean().item()
            print(f"update {update + 1:3d}  lr {lr:.2e}  reward of a step {reward:.3f}")


if __name__ == "__main__":
    main()
