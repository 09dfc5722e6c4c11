"""The demo model and two LoRA adapters of it side by side, in one batch.

    python 10_adapters.py [folder]

If the folder has none, they are trained first. This needs `pip install peft`, and half a minute on a CPU.
"""

import subprocess
import sys
from pathlib import Path

from aioengine import Engine

FOLDER = Path(sys.argv[1] if len(sys.argv) > 1 else Path.home() / ".cache/aioengine-examples/adapters").absolute()
NAMES = ["pirate", "brief"]
QUESTIONS = ["What is the capital of Norway?", "What is 2 + 5?"]


def main() -> None:
    if not all((FOLDER / name / "adapter_model.safetensors").exists() for name in NAMES):
        command = [sys.executable, "-m", "benchmarks.train_demo_adapter", "--out", str(FOLDER)]
        subprocess.run(command, check=True, cwd=Path(__file__).parent.parent)

    with Engine(enable_lora=True, lora_paths={name: str(FOLDER / name) for name in NAMES}) as llm:
        params = {"temperature": 0, "max_new_tokens": 32}
        for question in QUESTIONS:
            chat = [{"role": "user", "content": question}]
            adapters = [None, *NAMES]  # None: the model itself
            answers = llm.chat([chat] * 3, params, lora_path=adapters)
            for name, text in zip(adapters, answers["text"], strict=True):
                print(f"{name or 'base'}: {text}")


if __name__ == "__main__":
    main()
