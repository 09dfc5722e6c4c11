"""The demo model in 16 bits, and with weights that are quantized while they are loaded: memory and an answer."""

from aioengine import Engine, plan

PROMPT = "The capital of France is"


def main() -> None:
    for quantization in (None, "int8", "int4"):  # a folder that is quantized needs no argument
        size = plan(dtype="bfloat16", quantization=quantization).weights_bytes
        with Engine(dtype="bfloat16", quantization=quantization) as llm:
            answer = llm.generate(PROMPT, {"temperature": 0, "max_new_tokens": 8})
        print(f"{quantization or '16 bits'}: {size / 1e6:.1f} MB of weights, {PROMPT}{answer['text']}")


if __name__ == "__main__":
    main()
