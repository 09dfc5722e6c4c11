"""Questions about drawn pictures, with a tiny vision model: `python 11_images.py [folder]`.

If the folder has none, it is trained first. This needs `pip install pillow`, and a few minutes on a CPU.
"""

import subprocess
import sys
from pathlib import Path

from PIL import Image, ImageDraw

from aioengine import Engine

FOLDER = Path(sys.argv[1] if len(sys.argv) > 1 else Path.home() / ".cache/aioengine-examples/vision").absolute()
PROMPT = "<|im_start|>user\n<image>How many shapes are there?<|im_end|>\n<|im_start|>assistant\n"
QUESTIONS = ["What is in the picture?", "What is on the right?", "Is anything yellow?"]


def main() -> None:
    if not (FOLDER / "model.safetensors").exists():
        command = [sys.executable, "-m", "benchmarks.train_demo_vision_model", "--out", str(FOLDER)]
        subprocess.run(command, check=True, cwd=Path(__file__).parent.parent)
    one, two = (Image.new("RGB", (240, 240), "white") for _ in range(2))
    ImageDraw.Draw(one).ellipse((10, 90, 70, 150), "#d02020")  # a red circle on the left
    ImageDraw.Draw(two).rectangle((90, 80, 150, 140), "#2040d0")  # a blue square in the middle
    ImageDraw.Draw(two).polygon([(200, 90), (170, 150), (230, 150)], "#20a030")  # a green triangle on the right
    params = {"temperature": 0}
    with Engine(str(FOLDER)) as llm:
        print(llm.generate([PROMPT, PROMPT], params, image_data=[one, two])["text"])
        chat: list[dict[str, object]] = []
        for question in QUESTIONS:
            text = {"type": "text", "text": question}
            chat.append({"role": "user", "content": [text] if chat else [{"type": "image", "image": two}, text]})
            answer = llm.chat(chat, params)
            chat.append({"role": "assistant", "content": answer["text"]})
            print(f"{question} {answer['text']} [{answer['meta_info']['cached_tokens']} tokens were cached]")


if __name__ == "__main__":
    main()
