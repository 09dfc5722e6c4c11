"""CUDA graphs of decode steps and of steps with prompts."""
