"""Compile a whole GRPO loss: `torch.compile(loss, backend="dta")`, and nothing else changes.

    python examples/grpo_loss.py

The loss normalises rewards over the group, so it mixes the rollouts of the batch; only the part before that, one value
per token, runs over the prefix tree.
"""

import argparse

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

import dta_compile
from dta_compile.data import bundled, load_rollouts, pad_batch, vocab_size

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--steps", type=int, default=3)
parser.add_argument("--backend", default="dta")
parser.add_argument("--tensorboard", metavar="FOLDER", help="draw the figures of every step's plan there")
arguments = parser.parse_args()

rollouts = [rollout for rollout in load_rollouts(bundled(), dense=True) if rollout.group == 0 and rollout.turn < 2]
batch = pad_batch(rollouts)
rewards = torch.tensor([rollout.reward for rollout in rollouts])

torch.manual_seed(0)
shape = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "head_dim": 32}
heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
model = Qwen3ForCausalLM(Qwen3Config(vocab_size=vocab_size(bundled(), multiple=64), use_cache=False, **shape, **heads))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)


@torch.compile(backend=arguments.backend)
def grpo_loss(input_ids, attention_mask, labels, loss_mask, rewards):
    logits = model(input_ids, attention_mask=attention_mask).logits
    logprobs = logits.float().log_softmax(-1).gather(-1, labels[..., None])[..., 0]
    advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
    # On policy: the gradient of the probability ratio is that of the log-prob.
    return -(logprobs * advantages[:, None] * loss_mask).sum() / loss_mask.sum()


inputs = [torch.from_numpy(array) for array in (batch.input_ids, batch.attention_mask, batch.labels, batch.loss_mask)]
writer = None
if arguments.tensorboard:
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(arguments.tensorboard)
for step in range(arguments.steps):
    optimizer.zero_grad()
    loss = grpo_loss(*inputs, rewards)
    loss.backward()
    norm = torch.nn.utils.get_total_norm([parameter.grad for parameter in model.parameters()])
    optimizer.step()
    print(f"step {step + 1}: loss {loss.item():+.6f}, gradient norm {norm.item():.6f}")
    if writer is not None and arguments.backend == "dta":
        for name, value in dta_compile.last_plan(grpo_loss).scalars().items():  # wandb.log takes all of them at once
            writer.add_scalar(name, value, step)

if writer is not None:
    writer.close()
if arguments.backend == "dta":
    print(dta_compile.last_plan(grpo_loss))
