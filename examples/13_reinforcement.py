"""Reinforcement learning (GRPO) on the demo model: sample, learn, push the new weights, and sample again."""

import torch
from transformers import AutoModelForCausalLM

from aioengine import Answer, Engine
from aioengine.model_files.model_folder import DEMO_MODEL

PROMPTS = ["The capital of France is", "Once upon a time", "A dog and a cat"]
SAMPLING = {"n": 16, "temperature": 1.0, "top_p": 1.0, "top_k": -1, "max_new_tokens": 12, "ignore_eos": True}


def loss_of(model: torch.nn.Module, prompt: list[int], answers: list[Answer], rewards: torch.Tensor) -> torch.Tensor:
    outputs = torch.tensor([answer["output_ids"] for answer in answers])
    old = torch.tensor([[entry[0] for entry in answer["meta_info"]["output_token_logprobs"]] for answer in answers])
    logits = model(torch.cat([torch.tensor([prompt] * len(answers)), outputs], dim=1)).logits[:, len(prompt) - 1 : -1]
    ratios = (logits.log_softmax(-1).gather(-1, outputs.unsqueeze(-1)).squeeze(-1) - old).exp()
    advantages = ((rewards - rewards.mean()) / (rewards.std() + 1e-4)).unsqueeze(1)
    return -torch.minimum(ratios * advantages, ratios.clamp(0.8, 1.2) * advantages).mean()


def main() -> None:
    model = AutoModelForCausalLM.from_pretrained(DEMO_MODEL, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with Engine(dtype="float32", random_seed=0) as llm:
        for step in range(6):
            optimizer.zero_grad()
            rewards: list[torch.Tensor] = []
            for prompt in map(llm.tokenizer.encode, PROMPTS):
                answers = llm.generate(input_ids=[prompt], sampling_params=SAMPLING, return_logprob=True)
                rewards.append(torch.tensor([answer["text"].count("e") / 12 for answer in answers]))
                loss_of(model, prompt, answers, rewards[-1]).backward()  # type: ignore[no-untyped-call]
            print(f"{answers[0]['meta_info']['weight_version']}: mean reward {torch.cat(rewards).mean():.3f}")
            optimizer.step()
            assert llm.update_weights_from_tensor(model.state_dict(), weight_version=f"step-{step + 1}")


if __name__ == "__main__":
    main()
